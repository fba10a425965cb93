// Reductions over the lanes of a warp.

METAL_FUNC float sum_of_warp(float value) {
  UNROLL for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

METAL_FUNC uint max_of_warp(uint value) {
  return __reduce_max_sync(0xffffffffu, value);
}

METAL_FUNC uint min_of_warp(uint value) {
  return __reduce_min_sync(0xffffffffu, value);
}
