// Stands for CUDA's header of this name.
#ifndef CUDA_HOST_FP16
#define CUDA_HOST_FP16
#include "words.h"

typedef half __half;
typedef Two<__half> __half2;

CUDA_HOST_ARITHMETIC(__half2, __half)

__forceinline__ __half2 __half2half2(__half value) {
  return {value, value};
}

__forceinline__ __half __low2half(__half2 pair) {
  return pair.x;
}

__forceinline__ __half __high2half(__half2 pair) {
  return pair.y;
}

__forceinline__ __half2 __halves2half2(__half x, __half y) {
  return {x, y};
}

__forceinline__ float2 __half22float2(__half2 pair) {
  return float2{float(pair.x), float(pair.y)};
}

#endif  // CUDA_HOST_FP16
