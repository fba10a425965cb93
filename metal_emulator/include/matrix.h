// metal_simdgroup_matrix: 8x8 matrices spread over 32 lanes, two elements a lane.
#pragma once
#include "simd.h"

namespace emu {

// Apple's layout: the lane holds (row, column) and (row, column + 1).
METAL_FUNC constexpr u32 fragment_row(u32 lane) {
  u32 quad = lane / 4;
  return (quad & 4) + lane / 2 % 4;
}
METAL_FUNC constexpr u32 fragment_column(u32 lane) {
  u32 quad = lane / 4;
  return (quad & 2) * 2 + lane % 2 * 2;
}

using Row = metal::vec<float, 8>;
struct RowInMemory {
  Row row;
} __attribute__((aligned(32)));

// d = a * b + c in float, k ascending, product and sum rounded separately. Not inlined:
// a kernel multiplies in a hundred places, and clang would optimize as many copies. Its
// accesses are the emulator's own.
inline __attribute__((noinline, no_sanitize("thread"))) void multiply(Exchange& x) {
  const Row* b = reinterpret_cast<const Row*>(x.b);
  const Row* c = reinterpret_cast<const Row*>(x.c);
  Row* d = reinterpret_cast<Row*>(x.d);
  for (u32 row = 0; row < 8; ++row) {
    Row sum = c[row];
    for (u32 k = 0; k < 8; ++k) sum += x.a[8 * row + k] * b[k];
    d[row] = sum;
  }
}

template <class T>
METAL_FUNC void give(float* matrix, u32 at, metal::vec<T, 2> pair) {
  *reinterpret_cast<metal::vec<float, 2>*>(matrix + at) =
      make<metal::vec<float, 2>>(pair);
}

}  // namespace emu

// A meeting with a frame of its own, whose return address tells the place in the
// source.
#define EMU_MEETING \
  inline __attribute__((noinline, convergent, nomerge, no_sanitize("thread")))

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup matrices are half, bfloat or float");

  simdgroup_matrix() = default;
  // A diagonal matrix.
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    uint lane = emu::self().lane();
    uint row = emu::fragment_row(lane), column = emu::fragment_column(lane);
    elements_ =
        vec<T, 2>{row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0)};
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return elements_; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements_; }

 private:
  vec<T, 2> elements_;
};

template <class T, int Columns, int Rows = Columns>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> result;
  result.thread_elements() = vec<T, 2>{value, value};
  return result;
}

namespace detail {

template <class D, class A, class B, class C>
EMU_MEETING vec<D, 2> multiply_accumulate(const emu::Operation& operation, vec<A, 2> a,
                                          vec<B, 2> b, vec<C, 2> c) {
  emu::Self self = emu::self();
  emu::Exchange& exchange = self.simdgroup().exchange;
  uint at = 8 * emu::fragment_row(self.lane()) + emu::fragment_column(self.lane());
  emu::give(exchange.a, at, a);
  emu::give(exchange.b, at, b);
  emu::give(exchange.c, at, c);
  if (mslemu_arrive_from(&operation, __builtin_return_address(0)))
    emu::multiply(exchange);
  return emu::make<vec<D, 2>>(*reinterpret_cast<vec<float, 2>*>(exchange.d + at));
}

}  // namespace detail

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c) {
  static constexpr emu::Operation operation{"simdgroup_multiply_accumulate", true,
                                            emu::Operations::kMatrix};
  d.thread_elements() = detail::multiply_accumulate<D>(
      operation, a.thread_elements(), b.thread_elements(), c.thread_elements());
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                   const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  static constexpr emu::Operation operation{"simdgroup_multiply", true,
                                            emu::Operations::kMatrix};
  d.thread_elements() = detail::multiply_accumulate<D>(
      operation, a.thread_elements(), b.thread_elements(), vec<D, 2>(0));
}
template <class T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                               const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> result;
  simdgroup_multiply(result, a, b);
  return result;
}

namespace detail {

// Where this lane's two elements lie in memory.
struct Placement {
  ulong first, second;
};
METAL_FUNC Placement placement(ulong elements_per_row, vec<ulong, 2> origin,
                               bool transpose) {
  uint lane = emu::self().lane();
  ulong row = emu::fragment_row(lane), column = emu::fragment_column(lane);
  if (transpose)
    return {(origin[1] + column) * elements_per_row + origin[0] + row,
            (origin[1] + column + 1) * elements_per_row + origin[0] + row};
  ulong first = (origin[1] + row) * elements_per_row + origin[0] + column;
  return {first, first + 1};
}

}  // namespace detail

template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source,
                               ulong elements_per_row = 8,
                               vec<ulong, 2> origin = vec<ulong, 2>(0),
                               bool transpose_matrix = false) {
  static constexpr emu::Operation operation{"simdgroup_load", true,
                                            emu::Operations::kMatrixMemory};
  mslemu_arrive(&operation);
  auto at = detail::placement(elements_per_row, origin, transpose_matrix);
  matrix.thread_elements() = vec<T, 2>{source[at.first], source[at.second]};
}
template <class T>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target,
                                ulong elements_per_row = 8,
                                vec<ulong, 2> origin = vec<ulong, 2>(0),
                                bool transpose_matrix = false) {
  static constexpr emu::Operation operation{"simdgroup_store", true,
                                            emu::Operations::kMatrixMemory};
  mslemu_arrive(&operation);
  auto at = detail::placement(elements_per_row, origin, transpose_matrix);
  target[at.first] = matrix.thread_elements()[0];
  target[at.second] = matrix.thread_elements()[1];
}

}  // namespace metal
