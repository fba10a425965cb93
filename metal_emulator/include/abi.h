// What a compiled kernel and the run time agree on: where a thread finds itself, and
// the four calls that it may make. Both sides are compiled without any system header.
#pragma once

namespace emu {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Every thread has a stack of its own; the stacks of a worker and its state lie in one
// region aligned to its own size, so a stack pointer alone tells worker and thread.
constexpr u64 kStackBytes = 128 << 10;
constexpr u32 kLanes = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxSimdgroups = kMaxThreads / kLanes;
constexpr u64 kRegionBytes = 2 * kMaxThreads * kStackBytes;

// What the lanes of one simdgroup hand to each other. A lane may be one operation ahead
// of its neighbours, never two: `values` therefore exists twice.
struct alignas(64) Exchange {
  alignas(64) u8 values[2][kLanes][32];
  alignas(64) u8 results[kLanes][32];
  alignas(64) float a[64];
  alignas(64) float b[64];
  alignas(64) float c[64];
  alignas(64) float d[64];
};

enum class Operations : u32 { kSimd, kShuffle, kBarrier, kMatrix, kMatrixMemory };

struct Operation {
  const char* name;
  bool whole_simdgroup;  // undefined unless all 32 lanes exist
  Operations kind;
};

struct Simdgroup {
  u32 exist;           // lanes of this simdgroup in this threadgroup
  u32 ready;           // lanes that can run but do not
  u32 waiting;         // lanes in the current operation
  u32 stopped;         // lanes at a threadgroup barrier
  u32 returned;        // lanes that have left the kernel
  u32 full;            // lanes that wait until the others have been traced as far
  u32 polling;         // lanes that wait for another thread to change an atomic
  u32 parity[kLanes];  // which half of `values` a lane's next operation uses
  const void* site;    // return address of the first lane in the current operation
  const void* barrier_site;
  Exchange exchange;
};

struct Coordinates {
  u32 x, y, z;
};

// The threadgroup that a worker runs now.
struct Threadgroup {
  Coordinates position;  // threadgroup_position_in_grid
  Coordinates size;      // its own size: smaller than the nominal one at a ragged edge
  Coordinates nominal;
  Coordinates grid;   // threads
  Coordinates count;  // threadgroups
  u32 threads;
  void* const* buffers;
};

// First member of a worker, at kWorkerOffset of its region.
struct WorkerView {
  Threadgroup threadgroup;
  Simdgroup simdgroups[kMaxSimdgroups];
};

constexpr u64 kWorkerOffset = kMaxThreads * kStackBytes;

struct Self {
  WorkerView* worker;
  u32 index;  // thread_index_in_threadgroup

  u32 lane() const { return index % kLanes; }
  Simdgroup& simdgroup() const { return worker->simdgroups[index / kLanes]; }
};

inline __attribute__((always_inline)) Self self() {
  u64 stack;
#if defined(__x86_64__)
  asm("movq %%rsp, %0" : "=r"(stack));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(stack));
#else
#error "the emulator knows x86-64 and arm64"
#endif
  u64 region = stack & ~(kRegionBytes - 1);
  return {reinterpret_cast<WorkerView*>(region + kWorkerOffset),
          u32((stack - region) / kStackBytes)};
}

}  // namespace emu

// What kernels and Python see of the run time.
#define MSLEMU_EXPORT __attribute__((visibility("default")))
// A place where threads meet. The compiler may neither copy such a call into two
// branches nor make one of two: its return address tells the place in the source.
#define MSLEMU_MEETING MSLEMU_EXPORT __attribute__((convergent, nomerge))

extern "C" {
// Waits until every lane of the simdgroup has come. True for the last one, which runs
// on at once, before the others wake: it computes what all of them need.
MSLEMU_MEETING bool mslemu_arrive(const emu::Operation* operation);
// The same for a function that is not inlined: `site` is its own return address.
MSLEMU_EXPORT bool mslemu_arrive_from(const emu::Operation* operation,
                                      const void* site);
// `flags` are Metal's: the memory that the barrier orders.
MSLEMU_MEETING void mslemu_threadgroup_barrier(emu::u32 flags);
// Threadgroup memory number `slot` of the running threadgroup.
MSLEMU_EXPORT void* mslemu_threadgroup_memory(emu::u32 slot, emu::u64 bytes,
                                              const char* name);
// After an atomic that has read `before` and left `after`. Whoever reads nothing new
// for long lets other threads run.
MSLEMU_MEETING void mslemu_poll(const volatile void* address, emu::u64 before,
                                emu::u64 after);
// Trace mode only. A lane asks for the value of one that no simdgroup has.
MSLEMU_EXPORT void mslemu_no_lane(const emu::Operation* operation, emu::u32 lane);
// Before and after an atomic that loads (1), stores (2) or both.
MSLEMU_EXPORT void mslemu_atomic(const volatile void* address, emu::u32 bytes,
                                 emu::u32 does);
MSLEMU_EXPORT void mslemu_atomic_done(const volatile void* address, emu::u32 does);
MSLEMU_EXPORT void mslemu_fence(emu::u32 flags, emu::u32 order, emu::u32 scope);
MSLEMU_EXPORT void mslemu_order_simdgroup(emu::u32 flags);
}
