// metal_matrix: matrices of two to four columns and rows.
#pragma once
#include "library.h"

namespace metal {

template <class T, int Columns, int Rows>
struct matrix {
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
                "matrices are half, bfloat or float");
  static_assert(Columns >= 2 && Columns <= 4 && Rows >= 2 && Rows <= 4,
                "matrices have two to four columns and rows");
  using column_type = vec<T, Rows>;
  column_type columns[Columns];

  matrix() = default;
  constexpr explicit matrix(T) : columns{} {}
  constexpr matrix(column_type, column_type) : columns{} {
    static_assert(Columns == 2, "wrong number of columns for this matrix");
  }
  constexpr matrix(column_type, column_type, column_type) : columns{} {
    static_assert(Columns == 3, "wrong number of columns for this matrix");
  }
  constexpr matrix(column_type, column_type, column_type, column_type) : columns{} {
    static_assert(Columns == 4, "wrong number of columns for this matrix");
  }
  template <class... Scalars,
            class = enable_if_t<sizeof...(Scalars) == Columns * Rows &&
                                (is_arithmetic_v<Scalars> && ...)>>
  constexpr matrix(Scalars...) : columns{} {}
  template <class U>
  constexpr explicit matrix(matrix<U, Columns, Rows>) : columns{} {}

  thread column_type& operator[](int) thread&;
  device column_type& operator[](int) device&;
  threadgroup column_type& operator[](int) threadgroup&;
  const thread column_type& operator[](int) const thread&;
  const device column_type& operator[](int) const device&;
  const threadgroup column_type& operator[](int) const threadgroup&;
  const constant column_type& operator[](int) const constant&;
  // Temporaries are in no space in clang.
  column_type operator[](int) &&;
};

template <class T, int C, int R>
matrix<T, C, R> operator+(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator*(matrix<T, C, R>, emu::given<T>);
template <class T, int C, int R>
matrix<T, C, R> operator*(emu::given<T>, matrix<T, C, R>);
template <class T, int C, int R>
vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
template <class T, int C, int R>
vec<T, C> operator*(vec<T, R>, matrix<T, C, R>);
template <class T, int K, int R, int C>
matrix<T, C, R> operator*(matrix<T, K, R>, matrix<T, C, K>);
#define EMU_ASSIGN(space)                                                     \
  template <class T, int C, int R>                                            \
  space matrix<T, C, R>& operator+=(space matrix<T, C, R>&, matrix<T, C, R>); \
  template <class T, int C, int R>                                            \
  space matrix<T, C, R>& operator-=(space matrix<T, C, R>&, matrix<T, C, R>); \
  template <class T, int C, int R>                                            \
  space matrix<T, C, R>& operator*=(space matrix<T, C, R>&, emu::given<T>);   \
  template <class T, int N>                                                   \
  space matrix<T, N, N>& operator*=(space matrix<T, N, N>&, matrix<T, N, N>);
EMU_ASSIGN(thread)
EMU_ASSIGN(device)
EMU_ASSIGN(threadgroup)
#undef EMU_ASSIGN

template <class T, int C, int R>
matrix<T, R, C> transpose(matrix<T, C, R>);
template <class T, int N>
T determinant(matrix<T, N, N>);

}  // namespace metal
