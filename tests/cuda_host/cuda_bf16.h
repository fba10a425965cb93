// Stands for CUDA's header of this name.
#ifndef CUDA_HOST_BF16
#define CUDA_HOST_BF16
#include "words.h"

typedef bfloat __nv_bfloat16;
typedef Two<__nv_bfloat16> __nv_bfloat162;

CUDA_HOST_ARITHMETIC(__nv_bfloat162, __nv_bfloat16)

__forceinline__ __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) {
  return {value, value};
}

__forceinline__ __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) {
  return pair.x;
}

__forceinline__ __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) {
  return pair.y;
}

__forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}

#endif  // CUDA_HOST_BF16
