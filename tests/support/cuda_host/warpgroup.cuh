// Stands for shaders/cuda/warpgroup.cuh, where these are single instructions. What is asynchronous
// there is complete at once here: that somebody waits for it is not tested.

struct Shared {
  threadgroup char* place;
};

METAL_FUNC Shared operator+(Shared shared, int bytes) {
  return {shared.place + bytes};
}

METAL_FUNC Shared shared_at(float* place) {
  return {(char*)place};
}

METAL_FUNC int warp_of_thread(uint thread_index) {
  return thread_index / 32;
}

METAL_FUNC void warp_sync() {
  simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

METAL_FUNC void store_word(Shared shared, int offset, uint word) {
  ((uint*)shared.place)[offset] = word;
}

METAL_FUNC void store_two(Shared shared, const uint* words) {
  for (int i = 0; i < 2; ++i) {
    store_word(shared, i, words[i]);
  }
}

METAL_FUNC void store_four(Shared shared, const uint* words) {
  for (int i = 0; i < 4; ++i) {
    store_word(shared, i, words[i]);
  }
}

METAL_FUNC void load_four(uint* words, Shared shared) {
  for (int i = 0; i < 4; ++i) {
    words[i] = ((const uint*)shared.place)[i];
  }
}

// Arrivals so far, and how many complete a phase.
struct Barrier {
  ::metal::atomic<uint> arrivals;
  ::metal::atomic<uint> count;
};

METAL_FUNC Barrier* barrier_of(Shared shared) {
  return (Barrier*)shared.place;
}

METAL_FUNC void barrier_init(Shared shared, uint count) {
  ::metal::atomic_store_explicit(
      &barrier_of(shared)->arrivals, 0u, ::metal::memory_order_relaxed);
  ::metal::atomic_store_explicit(
      &barrier_of(shared)->count, count, ::metal::memory_order_relaxed);
}

METAL_FUNC void barriers_ready() {
}

METAL_FUNC void barrier_arrive(Shared shared) {
  atomic_thread_fence(
      metal::mem_flags::mem_threadgroup, ::metal::memory_order_release, thread_scope_threadgroup);
  ::metal::atomic_fetch_add_explicit(
      &barrier_of(shared)->arrivals, 1u, ::metal::memory_order_relaxed);
}

METAL_FUNC uint load_shared(::metal::atomic<uint>* number) {
  return ::metal::atomic_load_explicit(number, ::metal::memory_order_relaxed);
}

METAL_FUNC void barrier_wait(Shared shared, uint parity) {
  Barrier* barrier = barrier_of(shared);
  const uint count = load_shared(&barrier->count);
  while ((load_shared(&barrier->arrivals) / count & 1) == parity) {
  }
  atomic_thread_fence(
      metal::mem_flags::mem_threadgroup, ::metal::memory_order_acquire, thread_scope_threadgroup);
}

METAL_FUNC void stores_visible() {
}

METAL_FUNC void products_begin() {
}

METAL_FUNC void products_commit() {
}

template <int COUNT>
METAL_FUNC void products_wait() {
}

struct Columns {
  const threadgroup char* place;
};

template <int FRAGMENTS>
METAL_FUNC Columns columns_at(Shared shared) {
  return {shared.place};
}

METAL_FUNC Columns after(Columns columns, int bytes) {
  return {columns.place + bytes};
}

template <int COUNT>
struct Fragments {};

// Each warp's 16 rows of the 64: as mma.m16n8k16 has them, by NVIDIA's PTX ISA, "Register
// Fragments for wgmma.mma_async.m64nNk16". Of x, matrices of 8 rows of 16 bytes each lie in shared
// memory without swizzle, "Strides": those of a product's other fragments 128 bytes later, those of
// its other 8 values of k COUNT matrices later.
struct RowsOfWarp {
  uint a[4];
};

template <typename T>
METAL_FUNC float element_of_rows(const emu::Meeting<RowsOfWarp>& warp, int row, int k) {
  return element<T>(warp.of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2], k);
}

template <typename T, int COUNT>
METAL_FUNC float element_of_columns(Columns columns, int k, int column) {
  const int matrix = k / 8 * COUNT + column / 8;
  return float(((const T*)(columns.place + matrix * 128 + column % 8 * 16))[k % 8]);
}

template <typename T, int COUNT>
EMU_MEETING void wgmma_m64k16(float (*d)[4], RowsOfWarp own, Columns columns) {
  static constexpr emu::Operation operation{"wgmma.m64k16", true, emu::Operations::kMatrix};
  const emu::Meeting<RowsOfWarp> warp(own);
  mslemu_arrive_from(&operation, __builtin_return_address(0));
  // Each element is converted once: with as many conversions as products, they take most time.
  float rows[2][16];
  for (int i = 0; i < 32; ++i) {
    rows[i / 16][i % 16] = element_of_rows<T>(warp, warp.lane / 4 + i / 16 * 8, i % 16);
  }
  for (int i = 0; i < 2 * COUNT; ++i) {
    const int column = i / 2 * 8 + 2 * (warp.lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float x = element_of_columns<T, COUNT>(columns, k, column);
      d[i / 2][i % 2] += rows[0][k] * x;
      d[i / 2][i % 2 + 2] += rows[1][k] * x;
    }
  }
}

template <typename T, int COUNT>
METAL_FUNC void multiply_by_shared(
    float (*sums)[4], const uint* rows, Columns columns, T, Fragments<COUNT>) {
  wgmma_m64k16<T, COUNT>(sums, RowsOfWarp{{rows[0], rows[1], rows[2], rows[3]}}, columns);
}
