// Single instructions for which CUDA C++ has no function.

// Load 16 bytes: `load_kept` is for data that is read again, `load_once` bypasses the first-level
// cache.
METAL_FUNC Registers load_kept(const void* from) {
  return __ldg((const Registers*)from);
}

METAL_FUNC Registers load_once(const void* from) {
  Registers v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Stores 16 bytes; the compiler may divide an assignment.
METAL_FUNC void store_at_once(void* to, Registers v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Keeps a number in a register: in a loop, the assembler would otherwise recompute it from the
// thread index. It does not optimize a shuffle, even one in which every lane reads itself. All
// lanes of the warp must take part.
METAL_FUNC uint kept(uint number) {
  return __shfl_sync(0xffffffffu, number, threadIdx.x % 32);
}

// Returns (word & mask) | exponent; the compiler does not fuse this for two constants.
METAL_FUNC uint masked(uint word, uint mask, uint exponent) {
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(exponent));
  return result;
}

// sums += rows of w times columns of x, 16x8x16. lane.cuh shows which lane holds which element.
METAL_FUNC void multiply(float* sums, const uint* rows, const uint* columns, half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]));
}

METAL_FUNC void multiply(float* sums, const uint* rows, const uint* columns, bfloat) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]));
}
