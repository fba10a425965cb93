// metal_matrix: matrices of two to four columns and rows, stored by columns.
#pragma once
#include "geometric.h"

namespace metal {

template <class T, int Columns, int Rows>
struct matrix {
  static_assert(metal::is_same_v<T, float> || metal::is_same_v<T, half> ||
                    metal::is_same_v<T, bfloat>,
                "matrices are half, bfloat or float");
  static_assert(Columns >= 2 && Columns <= 4 && Rows >= 2 && Rows <= 4,
                "matrices have two to four columns and rows");
  using column_type = vec<T, Rows>;
  column_type columns[Columns];

  matrix() = default;
  METAL_FUNC constexpr explicit matrix(T diagonal) : columns{} {
    for (int i = 0; i < Columns; ++i) columns[i] = unit(i, diagonal);
  }
  METAL_FUNC constexpr matrix(column_type a, column_type b) : columns{a, b} {
    static_assert(Columns == 2, "wrong number of columns for this matrix");
  }
  METAL_FUNC constexpr matrix(column_type a, column_type b, column_type c)
      : columns{a, b, c} {
    static_assert(Columns == 3, "wrong number of columns for this matrix");
  }
  METAL_FUNC constexpr matrix(column_type a, column_type b, column_type c,
                              column_type d)
      : columns{a, b, c, d} {
    static_assert(Columns == 4, "wrong number of columns for this matrix");
  }
  template <class... Scalars,
            class = metal::enable_if_t<sizeof...(Scalars) == Columns * Rows &&
                                       (__is_arithmetic(Scalars) && ...)>>
  METAL_FUNC constexpr matrix(Scalars... scalars) : columns{} {
    const T values[] = {T(scalars)...};
    for (int i = 0; i < Columns; ++i) columns[i] = column(values + i * Rows);
  }
  template <class U>
  METAL_FUNC constexpr explicit matrix(const matrix<U, Columns, Rows>& other)
      : columns{} {
    for (int i = 0; i < Columns; ++i) columns[i] = emu::make<column_type>(other[i]);
  }

  METAL_FUNC constexpr column_type& operator[](int i) { return columns[i]; }
  METAL_FUNC constexpr const column_type& operator[](int i) const { return columns[i]; }

 private:
  METAL_FUNC static constexpr column_type column(const T* values) {
    if constexpr (Rows == 2)
      return column_type{values[0], values[1]};
    else if constexpr (Rows == 3)
      return column_type{values[0], values[1], values[2]};
    else
      return column_type{values[0], values[1], values[2], values[3]};
  }
  METAL_FUNC static constexpr column_type unit(int row, T value) {
    const T values[] = {row == 0 ? value : T(0), row == 1 ? value : T(0),
                        row == 2 ? value : T(0), row == 3 ? value : T(0)};
    return column(values);
  }
};

#define EMU_SUM(op)                                                  \
  template <class T, int C, int R>                                   \
  METAL_FUNC matrix<T, C, R> operator op(const matrix<T, C, R>& a,   \
                                         const matrix<T, C, R>& b) { \
    matrix<T, C, R> result;                                          \
    for (int i = 0; i < C; ++i) result[i] = a[i] op b[i];            \
    return result;                                                   \
  }                                                                  \
  template <class T, int C, int R>                                   \
  METAL_FUNC matrix<T, C, R>& operator op## =                        \
      (matrix<T, C, R> & a, const matrix<T, C, R>& b) {              \
    return a = a op b;                                               \
  }
EMU_SUM(+)
EMU_SUM(-)
#undef EMU_SUM

template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(const matrix<T, C, R>& a) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) result[i] = -a[i];
  return result;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(const matrix<T, C, R>& a, emu::given<T> scale) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) result[i] = a[i] * scale;
  return result;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(emu::given<T> scale, const matrix<T, C, R>& a) {
  return a * scale;
}
template <class T, int C, int R>
METAL_FUNC vec<T, R> operator*(const matrix<T, C, R>& a, vec<T, C> x) {
  vec<T, R> result = a[0] * x[0];
  for (int i = 1; i < C; ++i) result += a[i] * x[i];
  return result;
}
template <class T, int C, int R>
METAL_FUNC vec<T, C> operator*(vec<T, R> x, const matrix<T, C, R>& a) {
  vec<T, C> result(0);
  for (int i = 0; i < C; ++i) result[i] = dot(x, a[i]);
  return result;
}
template <class T, int K, int R, int C>
METAL_FUNC matrix<T, C, R> operator*(const matrix<T, K, R>& a,
                                     const matrix<T, C, K>& b) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) result[i] = a * b[i];
  return result;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R>& operator*=(matrix<T, C, R>& a, emu::given<T> scale) {
  return a = a * scale;
}
template <class T, int N>
METAL_FUNC matrix<T, N, N>& operator*=(matrix<T, N, N>& a, const matrix<T, N, N>& b) {
  return a = a * b;
}

template <class T, int C, int R>
METAL_FUNC matrix<T, R, C> transpose(const matrix<T, C, R>& a) {
  matrix<T, R, C> result;
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < R; ++j) result[j][i] = a[i][j];
  return result;
}

template <class T>
METAL_FUNC T determinant(const matrix<T, 2, 2>& a) {
  return a[0][0] * a[1][1] - a[1][0] * a[0][1];
}
template <class T>
METAL_FUNC T determinant(const matrix<T, 3, 3>& a) {
  return dot(a[0], cross(a[1], a[2]));
}
// Laplace expansion by minors of rows 0 and 1, and of rows 2 and 3.
template <class T>
METAL_FUNC T determinant(const matrix<T, 4, 4>& a) {
  auto minor = [&](int row, int i, int j) EMU_INLINE {
    return a[i][row] * a[j][row + 1] - a[j][row] * a[i][row + 1];
  };
  return minor(0, 0, 1) * minor(2, 2, 3) - minor(0, 0, 2) * minor(2, 1, 3) +
         minor(0, 0, 3) * minor(2, 1, 2) + minor(0, 1, 2) * minor(2, 0, 3) -
         minor(0, 1, 3) * minor(2, 0, 2) + minor(0, 2, 3) * minor(2, 0, 1);
}

}  // namespace metal
