// A simdgroup computes one row; its lanes take neighbouring words of 8 codes.
// Launch: N simdgroups, in threadgroups of one.
const uint row = threadgroup_position_in_grid.x;
float sum = 0.0f;
for (uint k = 8 * thread_index_in_simdgroup; k < K; k += 8 * 32) {
  const uint word = w[(row * K + k) / 8];
  const uint group = (row * K + k) / GROUP;
  const float scale = scales[group];
  const float bias = biases[group];
  for (uint i = 0; i < 8; ++i) {
    const uint code = (word >> (4 * i)) & 15;
    sum += float(x[k + i]) * (scale * float(code) + bias);
  }
}
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) {
  y[row] = half(sum);
}
