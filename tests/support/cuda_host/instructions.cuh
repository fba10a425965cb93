// Stands for shaders/cuda/instructions.cuh, where these are single instructions.

METAL_FUNC Registers load_kept(const void* from) {
  return *(const Registers*)from;
}

METAL_FUNC Registers load_once(const void* from) {
  return *(const Registers*)from;
}

METAL_FUNC void store_at_once(void* to, Registers v) {
  *(Registers*)to = v;
}

template <typename T>
METAL_FUNC T kept(T number) {
  return number;
}

METAL_FUNC uint masked(uint word, uint mask, uint exponent) {
  return (word & mask) | exponent;
}

// What a lane of a warp brings to mma.m16n8k16: a, 16x16, and b, 16x8.
struct Operands {
  uint a[4];
  uint b[2];
};

// Who holds which element, out of NVIDIA's PTX ISA, "Matrix Fragments for mma.m16n8k16 with
// floating point type": with groupID = lane / 4 and threadID_in_group = lane % 4,
//
//   a0..a7  row groupID, but + 8 of a2, a3, a6, a7; column 2 threadID_in_group + (i & 1), but
//           + 8 from a4 on
//   b0..b3  row 2 threadID_in_group + (i & 1), but + 8 from b2 on; column groupID
//   c0..c3  row groupID, but + 8 from c2 on; column 2 threadID_in_group + (i & 1)
//
// A register holds two elements, the first in its lower half.
template <typename T>
METAL_FUNC float element(uint reg, int i) {
  return float(as_type<T>(ushort(reg >> 16 * (i % 2))));
}

template <typename T>
METAL_FUNC float element_of_a(const emu::Meeting<Operands>& warp, int row, int k) {
  return element<T>(warp.of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2], k);
}

template <typename T>
METAL_FUNC float element_of_b(const emu::Meeting<Operands>& warp, int k, int column) {
  return element<T>(warp.of(column * 4 + k % 8 / 2).b[k / 8], k);
}

template <typename T>
EMU_MEETING void mma_m16n8k16(float* c, Operands own) {
  static constexpr emu::Operation operation{"mma.m16n8k16", true, emu::Operations::kMatrix};
  const emu::Meeting<Operands> warp(own);
  mslemu_arrive_from(&operation, __builtin_return_address(0));
  const int group = warp.lane / 4;
  const int thread_in_group = warp.lane % 4;
  for (int k = 0; k < 16; ++k) {
    const float low = element_of_a<T>(warp, group, k);
    const float high = element_of_a<T>(warp, group + 8, k);
    for (int i = 0; i < 2; ++i) {
      const float x = element_of_b<T>(warp, k, 2 * thread_in_group + i);
      c[i] += low * x;
      c[i + 2] += high * x;
    }
  }
}

template <typename T>
METAL_FUNC void multiply(float* sums, const uint* rows, const uint* columns, T) {
  mma_m16n8k16<T>(sums, Operands{{rows[0], rows[1], rows[2], rows[3]}, {columns[0], columns[1]}});
}
