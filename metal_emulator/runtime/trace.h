// State of trace mode. A traced kernel calls the run time at every access to memory
// (tsan.cpp); what threads do to each other is judged in races.cpp, what they do to the
// memory system is counted in traffic.cpp.
#pragma once
#include "runtime.h"

namespace emu {

using u16 = unsigned short;

constexpr u32 kLogLength = 4096;  // accesses of a lane between two meetings, or a flush
constexpr u32 kFirstThreadgroupMemory = 1 << 16;  // number of slot 0
constexpr u32 kFirstOperation = 1 << 17;          // number of Operations 0
constexpr u32 kThreadgroupBarrier = kFirstOperation + 16;

enum class Kind : u16 {
  kRead = 0,
  kWrite = 1,
  kAtomicWrite = 2,
  kAtomicRead = 3,
  kAtomicUpdate = 4,  // reads what it replaces
};

constexpr bool is_atomic(Kind kind) { return kind >= Kind::kAtomicWrite; }
constexpr bool reads(Kind kind) {
  return kind == Kind::kRead || kind == Kind::kAtomicRead || kind == Kind::kAtomicUpdate;
}
constexpr bool modifies(Kind kind) {
  return kind != Kind::kRead && kind != Kind::kAtomicRead;
}

// Whether Metal's mem_flags order a memory: 0 for device, 1 for threadgroup.
constexpr bool orders(u32 flags, u32 memory) { return flags >> memory & 1; }

// Who touched a byte, and when. Clocks count the barriers that order this memory.
struct Access {
  u32 site;   // offset of the return address in the kernel's library; 0 for nobody
  u32 group;  // number of the threadgroup
  u32 epoch;  // threadgroup barriers
  u32 step;   // simdgroup barriers
  u32 tick;   // release fences of the thread
  u16 thread;
  u16 other;  // a second lane that did the same in the same step, else `thread`
};

// What is known of one byte.
struct Cell {
  Access write;
  Access read;       // the latest one
  Access elsewhere;  // the latest one by another simdgroup of the same threadgroup
  Access apart;      // one by another threadgroup
  Access atomic;     // the latest atomic that changed it
};

// Layout shared with engine.py (ctypes): a buffer, and its shadow once traced.
struct Memory {
  u8* begin;
  u64 bytes;
  u8* reserved;
  u64 reserved_bytes;
  u32 writable;
  u32 written;  // whether every byte has a value from the start
  u64 residue;  // address modulo 16
  Cell* cells;
  u64 unwritten;        // bytes that nobody has written, if it was not filled before
  u64 first_unwritten;  // offset of the first of them
};

// What a line of the kernel does to one memory, or how often it performs an operation.
enum Value : u32 {
  kReadBytes,
  kRepeatedReadBytes,
  kWrittenBytes,
  kRepeatedWrittenBytes,
  kAccesses,
  kLines128,
  kLines64,
  kLines32,
  kBankCycles,
  kLaneReadBytes,
  kOperations,
  kValues,
};

// Layout shared with engine.py (ctypes).
struct Counter {
  u32 site;
  u32 memory;
  const char* name;  // of a threadgroup array or an operation
  u64 values[kValues];
  u32 next;  // number + 1 of the next counter of this site
  u32 reserved;
};

constexpr u32 kLocks = 1024;

struct Location;

// Layout shared with engine.py (ctypes).
struct Trace {
  const u8* library;  // where the kernel's library is loaded
  u64 library_bytes;
  Memory* memories;
  u64 memory_count;
  Counter* counters;  // of all workers, one after the other
  u64 counter_capacity;
  u64 counter_count;
  u64 threadgroup_bytes;  // the most that a threadgroup used
  u8* locks;              // of the cells of device memory
  Location* locations;    // of atomic variables
  u8 order_lock;
};

// One access of one lane, offsets counted from the begin of its memory.
struct Entry {
  u64 offset;
  u32 site;
  u32 memory;
  u16 bytes;
  Kind kind;
  u32 reserved;
};

// One access of a simdgroup, put together from its lanes.
struct Group {
  u32 site;
  u32 memory;
  u32 lanes;
  u16 bytes;
  Kind kind;
  u64 offsets[kLanes];
};

struct Gathering;
struct Known;

// Bytes that two lanes have stored to by one instruction: right if the second lane has
// left them as they were, which shows as soon as the store is done.
struct Doubt {
  u32 count;
  const u8* bytes[16];
  u8 values[16];
  Report report;
};

struct Tracer {
  Trace* trace;
  u32 group;      // number of the threadgroup
  // Of the two memories, device and threadgroup.
  u32 epochs[2];  // threadgroup barriers that order it
  u32 steps[kMaxSimdgroups][2];
  u32 flags[kMaxSimdgroups];  // of the simdgroup barrier to come
  u32 recent;                 // buffer found last
  Doubt doubt;
  u64 lengths[kMaxThreads];
  Entry* logs;              // kLogLength for every thread
  Cell* threadgroup_cells;  // for every slot, kThreadgroupLimit
  u32* first_counter;       // by site: number + 1
  u32* occurrences;         // by site, in the log that is being read
  Counter* counters;
  u32 counter_count;
  Gathering* gathering;
  u64 block_bytes;  // of all this

  // Order by atomics and fences, of each memory. What was acquired since the last barrier
  // that hands it on; by atomics of each memory, what they have read since the last
  // fence, and what the last fence has released.
  bool ordered;  // whether there is any of that
  Known* known[2];
  Known* simdgroup_known[kMaxSimdgroups][2];
  Known* acquired[kMaxThreads][2];
  Known* seen[kMaxThreads][2][2];
  Known* released[kMaxThreads][2][2];
  u32 ticks[kMaxThreads];
};

u64 gathering_bytes();

bool tracer_open(Worker* worker);
void tracer_close(Worker* worker);
// A new threadgroup begins.
void tracer_begin(Worker* worker, u32 number);
// All lanes of a simdgroup have come to a meeting, or have returned.
void tracer_met(Worker* worker, u32 simdgroup, const Operation* operation,
                const void* site);
void tracer_barrier(Worker* worker, u32 flags, const void* site);
// An access to bytes that exist; ends the threadgroup if it is wrong.
void check_access(Worker* worker, u32 thread, u32 memory, u64 offset, u32 bytes,
                  Kind kind, u32 site);
// Ends the threadgroup if the last store was not what it was hoped to be.
void settle(Worker* worker);
void count_accesses(Worker* worker, u32 simdgroup);
Counter& counter_of(Worker* worker, u32 site, u32 memory, const char* name);

// What an atomic does.
constexpr u32 kAtomicLoads = 1;
constexpr u32 kAtomicStores = 2;

u64 locations_bytes();
void order_close(Trace* trace);
void order_begin(Worker* worker);
// Whether fences and atomics put one access to a memory before another.
bool is_ordered(const Worker* worker, u32 memory, const Access& earlier,
                const Access& now);
void order_simdgroup(Worker* worker, u32 simdgroup, u32 memory);
void order_threadgroup(Worker* worker, u32 memory);
// Before and after an atomic operation, which nobody disturbs.
void order_atomic(Worker* worker, u32 thread, const volatile void* address, u32 does);
void order_atomic_done(Worker* worker, u32 thread, const volatile void* address,
                       u32 does);
void order_fence(Worker* worker, u32 thread, u32 flags, u32 order, u32 scope);

bool trace_open(Trace* trace);
void trace_close(Trace* trace);
void trace_collect(Trace* trace, Worker* worker);

}  // namespace emu
