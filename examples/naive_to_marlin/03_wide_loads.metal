// A lane loads four words, 32 codes, at once.
// Launch: N simdgroups, in threadgroups of one.
const uint row = threadgroup_position_in_grid.x;
float sum = 0.0f;
for (uint k = 32 * thread_index_in_simdgroup; k < K; k += 32 * 32) {
  const uint4 words = *(const device packed_uint4*)(w + (row * K + k) / 8);
  const uint group = (row * K + k) / GROUP;
  const float scale = scales[group];
  const float bias = biases[group];
  for (uint i = 0; i < 8; ++i) {
    const uint4 codes = (uint4(words[i / 2]) >> (16 * (i % 2) + uint4(0, 4, 8, 12))) & 15u;
    const float4 activations = float4(*(const device packed_half4*)(x + k + 4 * i));
    sum += dot(activations, scale * float4(codes) + bias);
  }
}
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) {
  y[row] = half(sum);
}
