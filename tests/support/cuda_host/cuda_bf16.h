// Stands for CUDA's header of this name.
#ifndef CUDA_HOST_BF16
#define CUDA_HOST_BF16
#include "words.h"

typedef bfloat __nv_bfloat16;
typedef Two<__nv_bfloat16> __nv_bfloat162;

// CUDA keeps numbers below the normal ones, here in the first place; Metal need not.
inline bfloat product(bfloat a, bfloat b) {
  ushort bits;
  memcpy(&bits, &a, sizeof(bits));
  if (bits & 0x7F80) {
    return bfloat(a * b);
  }
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  return bfloat(sign * float(bits & 0x7F) * 0x1p-33f * float(b) * 0x1p-100f);
}

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
