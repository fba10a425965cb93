// Scale and bias are taken out of the sum: scale * sum(x * code) + bias * sum(x).
// Launch: N simdgroups, in threadgroups of one.
const uint row = threadgroup_position_in_grid.x;
float sum = 0.0f;
for (uint k = 32 * thread_index_in_simdgroup; k < K; k += 32 * 32) {
  const uint4 words = *(const device packed_uint4*)(w + (row * K + k) / 8);
  float products = 0.0f;
  float x_sum = 0.0f;
  for (uint i = 0; i < 8; ++i) {
    const uint4 codes = (uint4(words[i / 2]) >> (16 * (i % 2) + uint4(0, 4, 8, 12))) & 15u;
    const float4 activations = float4(*(const device packed_half4*)(x + k + 4 * i));
    products += dot(activations, float4(codes));
    x_sum += dot(activations, float4(1.0f));
  }
  const uint group = (row * K + k) / GROUP;
  sum += float(scales[group]) * products + float(biases[group]) * x_sum;
}
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) {
  y[row] = half(sum);
}
