// The four simdgroups of a threadgroup take tiles along k in turn, and add their sums in
// threadgroup memory: four times as many simdgroups hide the latency of loads.
// Launch: N / 32 threadgroups of four simdgroups.
const uint tile_row = threadgroup_position_in_grid.x;
const uint slice = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint row = (lane / 16) * 4 + (lane / 2) % 4;
const uint pair = (lane / 8) % 2 * 2 + lane % 2;
threadgroup float partial_sums[4 * 32];

float4 sums = 0.0f;
for (uint tile_k = slice; tile_k < K / 64; tile_k += 4) {
  const uint tile = tile_row * (K / 64) + tile_k;
  const device half* first = x + 64 * tile_k + 16 * pair;
  float4 products = 0.0f;
  float x_sum = 0.0f;
  for (uint part = 0; part < 2; ++part) {
    const uint4 words = *(const device packed_uint4*)(w + 256 * tile + 128 * part + 4 * lane);
    const float4 low = float4(*(const device packed_half4*)(first + 4 * part));
    const float4 high = float4(*(const device packed_half4*)(first + 4 * part + 8));
    for (uint i = 0; i < 4; ++i) {
      for (uint f = 0; f < 4; ++f) {
        const uint bits = ((words[f] >> (4 * i)) & 0x000F000F) | 0x64006400;
        const float2 codes = float2(as_type<half2>(bits)) - 1024.0f;
        products[f] += low[i] * codes.x + high[i] * codes.y;
      }
    }
    x_sum += dot(low + high, float4(1.0f));
  }
  const uint group = tile_row * (K / GROUP) + 64 * tile_k / GROUP;
  const device half* parameters = scales + 64 * group + 8 * row;
  const float4 a = float4(*(const device packed_half4*)(parameters));
  const float4 b = float4(*(const device packed_half4*)(parameters + 4));
  sums += float4(a.x, a.z, b.x, b.z) * products + float4(a.y, a.w, b.y, b.w) * x_sum;
}
for (uint f = 0; f < 4; ++f) {
  float sum = sums[f];
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(8));
  if (pair == 0) {
    partial_sums[32 * slice + row + 8 * f] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (slice == 0) {
  float sum = 0.0f;
  for (uint other = 0; other < 4; ++other) {
    sum += partial_sums[32 * other + lane];
  }
  y[32 * tile_row + lane] = half(sum);
}
