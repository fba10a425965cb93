// What MLX puts before every custom kernel, in our words: its type names, limits, and
// the index arithmetic of strided arrays.
#pragma once
#include "atomic.h"
#include "matrix.h"
#include "metal_matrix.h"
#include "pack.h"

using namespace metal;

struct complex64_t {
  float real;
  float imag;
  constexpr complex64_t(float real_part = 0, float imaginary_part = 0)
      : real(real_part), imag(imaginary_part) {}
};
constexpr complex64_t operator+(complex64_t a, complex64_t b) {
  return {a.real + b.real, a.imag + b.imag};
}
constexpr complex64_t operator-(complex64_t a, complex64_t b) {
  return {a.real - b.real, a.imag - b.imag};
}
constexpr complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
constexpr complex64_t operator-(complex64_t a) { return {-a.real, -a.imag}; }
constexpr bool operator==(complex64_t a, complex64_t b) {
  return a.real == b.real && a.imag == b.imag;
}

#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_LOOP_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

static constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
static constexpr int REDUCE_N_READS = 4;
static constexpr int REDUCE_N_WRITES = 4;
static constexpr int SOFTMAX_N_READS = 4;
static constexpr int RMS_N_READS = 4;
static constexpr int RMS_LOOPED_LIMIT = 4096;

// `max` and `min` are infinite for floating types, `finite_` ones are not.
template <class U>
struct Limits {
  static constexpr U max = numeric_limits<U>::infinity();
  static constexpr U min = is_floating_point_v<U> ? U(-numeric_limits<U>::infinity())
                                                  : numeric_limits<U>::lowest();
  static constexpr U finite_max = numeric_limits<U>::max();
  static constexpr U finite_min = numeric_limits<U>::lowest();
};
template <>
struct Limits<bool> {
  static constexpr bool max = true, min = false, finite_max = true, finite_min = false;
};

template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, const int* shape, const int64_t* strides,
                            int ndim) {
  IdxT location = 0;
  for (int axis = ndim - 1; axis >= 0 && elem > 0; --axis) {
    location += IdxT(elem % shape[axis]) * IdxT(strides[axis]);
    elem /= shape[axis];
  }
  return location;
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, const int* shape, const int64_t* strides,
                            int ndim) {
  IdxT location = elem.x * IdxT(strides[ndim - 1]) + elem.y * IdxT(strides[ndim - 2]);
  for (int axis = ndim - 3; axis >= 0; --axis) {
    location += IdxT(elem.z % shape[axis]) * IdxT(strides[axis]);
    elem.z /= shape[axis];
  }
  return location;
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_1(uint elem, const int64_t& stride) {
  return elem * IdxT(stride);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_2(uint2 elem, const int64_t strides[2]) {
  return elem.x * IdxT(strides[1]) + elem.y * IdxT(strides[0]);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_3(uint3 elem, const int64_t strides[3]) {
  return elem.x * IdxT(strides[2]) + elem.y * IdxT(strides[1]) +
         elem.z * IdxT(strides[0]);
}
METAL_FUNC ulong2 elem_to_loc_2_nd(uint3 elem, const int* shape,
                                   const int64_t* a_strides, const int64_t* b_strides,
                                   int ndim) {
  return ulong2{ulong(elem_to_loc(elem, shape, a_strides, ndim)),
                ulong(elem_to_loc(elem, shape, b_strides, ndim))};
}

template <class T, class U>
METAL_FUNC T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

template <class T, class U>
METAL_FUNC T cast_to(U value) {
  return emu::cast<T>(value);
}

METAL_FUNC float log1p(float x) {
  float shifted = 1.0f + x;
  if (shifted == 1.0f) return x;
  if (shifted == Limits<float>::max) return shifted;
  return x * (log(shifted) / (shifted - 1.0f));
}
