// Metal's names in CUDA, so that CUDA can compile the files of ../lib. All declarations are in a
// namespace, because MLX compiles a body inside its own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// CUDA's macro __device__ expands to the word `device`, which is a macro below.
#undef __device__
#define METAL_FUNC __attribute__((__device__)) __forceinline__
#define UNROLL _Pragma("unroll")
#define device
#define constant
#define thread
#define threadgroup

namespace marlin {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 bfloat;
typedef __nv_bfloat162 bfloat2;

struct ushort2 {
  ushort x;
  ushort y;
  METAL_FUNC ushort2(ushort first, ushort second) : x(first), y(second) {
  }
};

// Vectors that are aligned to words, like packed vectors of Metal.
struct packed_uint2 {
  uint x;
  uint y;
};
struct packed_uint3 {
  uint x;
  uint y;
  uint z;
};
struct packed_uint4 {
  uint x;
  uint y;
  uint z;
  uint w;
};
typedef packed_uint2 uint2;
typedef packed_uint3 uint3;

// Four registers that are loaded at once.
typedef ::uint4 Registers;
struct uint4 : packed_uint4 {
  METAL_FUNC uint4(packed_uint4 other) : packed_uint4(other) {
  }
};

template <typename To, typename From>
METAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

template <typename T, int N>
struct vec;
template <>
struct vec<half, 2> {
  half x;
  half y;
  METAL_FUNC vec(half first, half second) : x(first), y(second) {
  }
};
METAL_FUNC vec<half, 2> operator-(vec<half, 2> a, half b) {
  return vec<half, 2>(__hsub(a.x, b), __hsub(a.y, b));
}

METAL_FUNC float abs(float x) {
  return fabsf(x);
}

METAL_FUNC float exp(float x) {
  return expf(x);
}

METAL_FUNC float copysign(float x, float sign) {
  return copysignf(x, sign);
}

struct mem_flags {
  static constexpr int mem_threadgroup = 0;
};
METAL_FUNC void threadgroup_barrier(int) {
  __syncthreads();
}

// No CUDA plan has atomic sums; this lets the files of ../lib that offer them compile.
template <typename T>
struct atomic {
  T value;
};
constexpr int memory_order_relaxed = 0;
METAL_FUNC void atomic_fetch_add_explicit(atomic<float>* to, float value, int) {
  atomicAdd(&to->value, value);
}

}  // namespace marlin
