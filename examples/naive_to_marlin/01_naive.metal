// A thread computes one row: y[row] is the sum of x[k] * (scale * code + bias).
// Launch: N threads, in threadgroups of 32.
const uint row = thread_position_in_grid.x;
float sum = 0.0f;
for (uint k = 0; k < K; ++k) {
  const uint word = w[(row * K + k) / 8];
  const uint code = (word >> (4 * (k % 8))) & 15;
  const uint group = (row * K + k) / GROUP;
  sum += float(x[k]) * (float(scales[group]) * float(code) + float(biases[group]));
}
y[row] = half(sum);
