// What MLX puts before every custom kernel: its type names, limits, and the index
// arithmetic of strided arrays.
#pragma once
#include "atomic.h"
#include "metal_matrix.h"

using namespace metal;

template <class T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T a, T b) : real(a), imag(b) {}
  constexpr complex_t(vec<T, 2>) : real(0), imag(0) {}
  template <class U, class = enable_if_t<is_arithmetic_v<U>>>
  constexpr complex_t(U) : real(0), imag(0) {}
  complex_t(const complex_t&) = default;
  constexpr complex_t(const constant complex_t&) : real(0), imag(0) {}
  complex_t& operator=(const complex_t&) = default;
  constexpr operator vec<T, 2>() const;
  template <class U, class = enable_if_t<is_arithmetic_v<U>>>
  explicit constexpr operator U() const;
};
using complex64_t = complex_t<float>;
complex64_t operator-(complex64_t);
#define EMU_COMPLEX(op) complex64_t operator op(complex64_t, complex64_t);
EMU_COMPLEX(+)
EMU_COMPLEX(-)
EMU_COMPLEX(*)
EMU_COMPLEX(/)
EMU_COMPLEX(%)
#undef EMU_COMPLEX
#define EMU_COMPARE(op) bool operator op(complex64_t, complex64_t);
EMU_COMPARE(==)
EMU_COMPARE(<)
EMU_COMPARE(>)
EMU_COMPARE(<=)
EMU_COMPARE(>=)
#undef EMU_COMPARE
#define EMU_ADD(space) space complex64_t& operator+=(space complex64_t&, complex64_t);
EMU_ADD(thread)
EMU_ADD(threadgroup)
EMU_ADD(device)
#undef EMU_ADD

#define MTL_CONST static constant constexpr const
#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_LOOP_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

MLX_MTL_CONST int MAX_REDUCE_SPECIALIZED_DIMS = 4;
MLX_MTL_CONST int REDUCE_N_READS = 4;
MLX_MTL_CONST int REDUCE_N_WRITES = 4;
MLX_MTL_CONST int SOFTMAX_N_READS = 4;
MLX_MTL_CONST int RMS_N_READS = 4;
MLX_MTL_CONST int RMS_LOOPED_LIMIT = 4096;

template <class U>
struct WorkPerThread {
  static constexpr constant int n = 8 / sizeof(U);
};

template <class U>
struct Limits {
  static constexpr constant U max = numeric_limits<U>::infinity();
  static constexpr constant U min = numeric_limits<U>::lowest();
  static constexpr constant U finite_max = numeric_limits<U>::max();
  static constexpr constant U finite_min = numeric_limits<U>::lowest();
};

template <class IdxT = int64_t>
IdxT elem_to_loc(IdxT, const constant int*, const constant int64_t*, int);
template <class IdxT = int64_t>
IdxT elem_to_loc(uint3, const constant int*, const constant int64_t*, int);
template <class IdxT = int64_t>
IdxT elem_to_loc_1(uint, const constant int64_t&);
template <class IdxT = int64_t>
IdxT elem_to_loc_2(uint2, const constant int64_t*);
template <class IdxT = int64_t>
IdxT elem_to_loc_3(uint3, const constant int64_t*);
template <class IdxT = int64_t>
vec<IdxT, 2> elem_to_loc_2_nd(uint3, const constant int*, const constant int64_t*,
                              const constant int64_t*, int);
template <class IdxT = int64_t>
vec<IdxT, 3> elem_to_loc_3_nd(uint3, const constant int*, const constant int64_t*,
                              const constant int64_t*, const constant int64_t*, int);
template <int Dim, class OffsetT = size_t, bool General = true>
struct LoopedElemToLoc {
  int dim;
  OffsetT offset;
  LoopedElemToLoc(int);
  void next(const constant int*, const constant int64_t*) thread;
  void next(int, const constant int*, const constant int64_t*) thread;
  OffsetT location() thread;
};

template <class T, class U>
constexpr T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

template <class T, class U>
T cast_to(U);

float log1p(float);
bfloat log1p(bfloat);
complex64_t log1p(complex64_t);
float hypot(float, float);

template <int BM>
bool schedule_row_tile(const device int32_t*, int, int, int, uint, thread int&,
                       thread int&, thread short&);
