// A simdgroup computes four rows: x and its sum stay in registers for all of them.
// Launch: N / 4 simdgroups, in threadgroups of one.
const uint first_row = 4 * threadgroup_position_in_grid.x;
float4 sums = 0.0f;
for (uint k = 32 * thread_index_in_simdgroup; k < K; k += 32 * 32) {
  float4 activations[8];
  float x_sum = 0.0f;
  for (uint i = 0; i < 8; ++i) {
    activations[i] = float4(*(const device packed_half4*)(x + k + 4 * i));
    x_sum += dot(activations[i], float4(1.0f));
  }
  for (uint row = 0; row < 4; ++row) {
    const uint start = (first_row + row) * K + k;
    const uint4 words = *(const device packed_uint4*)(w + start / 8);
    float products = 0.0f;
    for (uint i = 0; i < 8; ++i) {
      const uint4 codes = (uint4(words[i / 2]) >> (16 * (i % 2) + uint4(0, 4, 8, 12))) & 15u;
      products += dot(activations[i], float4(codes));
    }
    const uint group = start / GROUP;
    sums[row] += float(scales[group]) * products + float(biases[group]) * x_sum;
  }
}
for (uint row = 0; row < 4; ++row) {
  const float sum = simd_sum(sums[row]);
  if (thread_index_in_simdgroup == 0) {
    y[first_row + row] = half(sum);
  }
}
