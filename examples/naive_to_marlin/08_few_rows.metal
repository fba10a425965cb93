// Four rows of x share each decoded code: the weight is still read once.
// Launch: N / 32 threadgroups of four simdgroups.
const uint tile_row = threadgroup_position_in_grid.x;
const uint slice = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint row = (lane / 16) * 4 + (lane / 2) % 4;
const uint pair = (lane / 8) % 2 * 2 + lane % 2;
threadgroup float partial_sums[4 * ROWS * 32];

float4 sums[ROWS];
for (uint m = 0; m < ROWS; ++m) {
  sums[m] = 0.0f;
}
for (uint tile_k = slice; tile_k < K / 64; tile_k += 4) {
  const uint tile = tile_row * (K / 64) + tile_k;
  const device half* first = x + 64 * tile_k + 16 * pair;
  float4 products[ROWS];
  float x_sums[ROWS];
  for (uint m = 0; m < ROWS; ++m) {
    products[m] = 0.0f;
    x_sums[m] = 0.0f;
  }
  for (uint part = 0; part < 2; ++part) {
    const uint4 words = *(const device packed_uint4*)(w + 256 * tile + 128 * part + 4 * lane);
    float4 low[ROWS];
    float4 high[ROWS];
    for (uint m = 0; m < ROWS; ++m) {
      const device half* activations = first + m * K + 4 * part;
      low[m] = float4(*(const device packed_half4*)(activations));
      high[m] = float4(*(const device packed_half4*)(activations + 8));
      x_sums[m] += dot(low[m] + high[m], float4(1.0f));
    }
    for (uint i = 0; i < 4; ++i) {
      for (uint f = 0; f < 4; ++f) {
        const uint bits = ((words[f] >> (4 * i)) & 0x000F000F) | 0x64006400;
        const float2 codes = float2(as_type<half2>(bits)) - 1024.0f;
        for (uint m = 0; m < ROWS; ++m) {
          products[m][f] += low[m][i] * codes.x + high[m][i] * codes.y;
        }
      }
    }
  }
  const uint group = tile_row * (K / GROUP) + 64 * tile_k / GROUP;
  const device half* parameters = scales + 64 * group + 8 * row;
  const float4 a = float4(*(const device packed_half4*)(parameters));
  const float4 b = float4(*(const device packed_half4*)(parameters + 4));
  for (uint m = 0; m < ROWS; ++m) {
    sums[m] += float4(a.x, a.z, b.x, b.z) * products[m] + float4(a.y, a.w, b.y, b.w) * x_sums[m];
  }
}
for (uint m = 0; m < ROWS; ++m) {
  for (uint f = 0; f < 4; ++f) {
    float sum = sums[m][f];
    sum += simd_shuffle_xor(sum, ushort(1));
    sum += simd_shuffle_xor(sum, ushort(8));
    if (pair == 0) {
      partial_sums[(slice * ROWS + m) * 32 + row + 8 * f] = sum;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint m = slice; m < ROWS; m += 4) {
  float sum = 0.0f;
  for (uint other = 0; other < 4; ++other) {
    sum += partial_sums[(other * ROWS + m) * 32 + lane];
  }
  y[m * N + 32 * tile_row + lane] = half(sum);
}
