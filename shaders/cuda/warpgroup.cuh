// Instructions of Hopper (sm_90a) for stages in shared memory and for warpgroups, which are four
// warps. Every function is a single instruction, or computes an address for one.

// An address in shared memory as instructions take it. The shuffle makes it uniform in a warp, so
// that what is computed from it stays in uniform registers.
typedef uint Shared;

METAL_FUNC Shared shared_at(const void* address) {
  return __shfl_sync(0xffffffffu, uint(__cvta_generic_to_shared(address)), 0);
}

// Returns the index of the warp, also as a uniform value.
METAL_FUNC int warp_of_thread(uint thread_index) {
  return __shfl_sync(0xffffffffu, int(thread_index / 32), 0);
}

METAL_FUNC void warp_sync() {
  __syncwarp();
}

METAL_FUNC void store_word(Shared address, int offset, uint word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address + 4 * offset), "r"(word) : "memory");
}

// Addresses of four words are multiples of 16 bytes, those of two words multiples of 8.
METAL_FUNC void store_two(Shared address, const uint* words) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
               : "memory");
}

METAL_FUNC void store_four(Shared address, const uint* words) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(words[0]),
               "r"(words[1]),
               "r"(words[2]),
               "r"(words[3])
               : "memory");
}

METAL_FUNC void load_four(uint* words, Shared address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Barriers in shared memory, 8 bytes each: `count` arrivals complete a phase.
METAL_FUNC void barrier_init(Shared barrier, uint count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Makes the barriers that this thread initialized visible to all threads.
METAL_FUNC void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

METAL_FUNC void barrier_arrive(Shared barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity is complete.
METAL_FUNC void barrier_wait(Shared barrier, uint parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes what this thread stored in shared memory visible to matrix products.
METAL_FUNC void stores_visible() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

METAL_FUNC void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

METAL_FUNC void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until no more than COUNT commits are unfinished.
template <int COUNT>
METAL_FUNC void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// Descriptor of x for matrix products, without swizzle: matrices of 8 rows and 16 bytes are
// contiguous. The matrix of the next 8 rows follows; that of the next 8 values of k is FRAGMENTS
// matrices later.
typedef unsigned long long Columns;

template <int FRAGMENTS>
METAL_FUNC Columns columns_at(Shared address) {
  constexpr uint MATRIX = 128 / 16;
  return Columns(MATRIX) << 32 | (MATRIX * FRAGMENTS << 16 | (address & 0x3ffff) >> 4);
}

METAL_FUNC Columns after(Columns columns, int bytes) {
  return columns + bytes / 16;
}

// sums += rows of w, from registers, times columns of x, from shared memory: 64x16 by
// 16x(8 FRAGMENTS), with 16 rows for each warp. Lanes hold elements as in lane.cuh.

template <int COUNT>
struct Fragments {};

#define SUMS_OF_4(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define SUMS_OF_8(i) SUMS_OF_4(i), SUMS_OF_4(i + 4)
#define SUMS_OF_16(i) SUMS_OF_8(i), SUMS_OF_8(i + 8)
#define SUMS_OF_32(i) SUMS_OF_16(i), SUMS_OF_16(i + 16)

// The sums are the first registers of OPERANDS.
#define MULTIPLY(T, NAME, COLUMNS, OPERANDS, ...)                                         \
  METAL_FUNC void multiply_by_shared(                                                     \
      float (*sums)[4], const uint* rows, Columns columns, T, Fragments<COLUMNS / 8>) {   \
    float* s = *sums;                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME    \
                 " " OPERANDS ", 1, 1, 1, 0;"                                             \
                 : __VA_ARGS__                                                            \
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns)); \
  }
#define MULTIPLY_BOTH(...)           \
  MULTIPLY(half, "f16", __VA_ARGS__) \
  MULTIPLY(bfloat, "bf16", __VA_ARGS__)

MULTIPLY_BOTH(
    16,
    "{%0,%1,%2,%3,%4,%5,%6,%7}, "
    "{%8,%9,%10,%11}, %12",
    SUMS_OF_8(0))
MULTIPLY_BOTH(
    24,
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, "
    "{%12,%13,%14,%15}, %16",
    SUMS_OF_8(0),
    SUMS_OF_4(8))
MULTIPLY_BOTH(
    32,
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
    "{%16,%17,%18,%19}, %20",
    SUMS_OF_16(0))
MULTIPLY_BOTH(
    48,
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23}, "
    "{%24,%25,%26,%27}, %28",
    SUMS_OF_16(0),
    SUMS_OF_8(16))
MULTIPLY_BOTH(
    64,
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "{%32,%33,%34,%35}, %36",
    SUMS_OF_32(0))

#undef MULTIPLY_BOTH
#undef MULTIPLY
#undef SUMS_OF_32
#undef SUMS_OF_16
#undef SUMS_OF_8
#undef SUMS_OF_4
