// CUDA's words in the emulator's: what a kernel may ask for anywhere. The emulator's own
// headers, which come first, have `half`, `bfloat`, `uint2`, `uint4`, `min` and `expf`.
#ifndef CUDA_HOST_WORDS
#define CUDA_HOST_WORDS

#define __forceinline__ inline __attribute__((always_inline))
#define memcpy __builtin_memcpy

#define blockIdx (emu::attribute::threadgroup_position_in_grid())
#define blockDim (emu::attribute::dispatch_threads_per_threadgroup())
#define threadIdx (emu::attribute::thread_position_in_threadgroup())
#define __syncthreads() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)

__forceinline__ float fabsf(float x) {
  return __builtin_fabsf(x);
}

__forceinline__ float rsqrtf(float x) {
  return metal::rsqrt(x);
}

__forceinline__ float rintf(float x) {
  return __builtin_rintf(x);
}

__forceinline__ void __sincosf(float x, float* sine, float* cosine) {
  *sine = metal::precise::sin(x);
  *cosine = metal::precise::cos(x);
}

#define __shfl_xor_sync(lanes, value, distance) metal::simd_shuffle_xor(value, ushort(distance))

#define __reduce_max_sync(lanes, value) metal::simd_max(value)

#define __reduce_min_sync(lanes, value) metal::simd_min(value)

#define __ballot_sync(lanes, vote) uint(ulong(metal::simd_vote::vote_t(metal::simd_ballot(vote))))

__forceinline__ int __popc(uint lanes) {
  return __builtin_popcount(lanes);
}

__forceinline__ int __ffs(uint lanes) {
  return __builtin_ffs(lanes);
}

__forceinline__ float copysignf(float x, float sign) {
  return __builtin_copysignf(x, sign);
}

__forceinline__ float fmaf(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

template <class T>
__forceinline__ T __ldg(const T* from) {
  return *from;
}

// Byte i of the result is the byte of (second, first) that hexadecimal digit i names.
__forceinline__ uint __byte_perm(uint first, uint second, uint selector) {
  const ulong bytes = ulong(second) << 32 | first;
  uint result = 0;
  for (uint i = 0; i < 4; ++i) {
    const uint digit = selector >> 4 * i & 15;
    const uint byte = uint(bytes >> 8 * (digit & 7)) & 255;
    result |= (digit < 8 ? byte : byte < 128 ? 0 : 255) << 8 * i;
  }
  return result;
}

// No kernel's plan uses it: the text has to compile.
float atomicAdd(float* to, float value);

// Two values of 16 bits in a register, and their arithmetic, each result rounded once.
template <class T>
struct alignas(4) Two {
  T x;
  T y;
};

template <class T>
T product(T a, T b) {
  return T(a * b);
}

#define CUDA_HOST_ARITHMETIC(T2, T)                                \
  __forceinline__ T __hsub(T a, T b) {                             \
    return a - b;                                                  \
  }                                                                \
  __forceinline__ T2 __hsub2(T2 a, T2 b) {                         \
    return {T(a.x - b.x), T(a.y - b.y)};                           \
  }                                                                \
  __forceinline__ T2 __hmul2(T2 a, T2 b) {                         \
    return {product(a.x, b.x), product(a.y, b.y)};                 \
  }                                                                \
  __forceinline__ T2 __hfma2(T2 a, T2 b, T2 c) {                   \
    return {metal::fma(a.x, b.x, c.x), metal::fma(a.y, b.y, c.y)}; \
  }

// From here on: every loop of ours is unrolled, and to optimize that takes four times as long
// as all the rest of a test.
#pragma clang optimize off

#endif  // CUDA_HOST_WORDS
