// What a traced kernel calls at every access to memory: the names that clang's thread
// sanitizer gives to such calls, with our own meaning. No sanitizer's run time is
// there.
#include "trace.h"

extern "C" {
void* memmove(void* to, const void* from, unsigned long bytes);
}

using namespace emu;

namespace {

constexpr u32 kNowhere = ~0u;

u32 site_of(const Trace* trace, const void* address) {
  return u32(static_cast<const u8*>(address) - trace->library);
}

[[noreturn]] __attribute__((noinline)) void outside(Worker* worker, u32 thread,
                                                    const ThreadgroupArray* array,
                                                    u64 address, Kind kind, u32 site) {
  Report report =
      report_of(worker, array ? Fault::kThreadgroupAccess : Fault::kAccess, thread);
  report.is_write = modifies(kind);
  report.address = address;
  if (array) {
    report.address = address - u64(array->begin);
    report.text = array->name;
    report.amount = array->bytes;
  }
  trace_calls(report, worker, worker->tracer->trace->library + site);
  abandon(worker, report);
}

// The first byte of [at, at + bytes) that does not lie in [0, size), if there is one.
bool leaves(u64 at, u64 bytes, u64 size, u64& first) {
  if (at < size && bytes <= size - at) return false;
  first = at < size ? size : at;
  return true;
}

u32 find_memory(Tracer* tracer, u64 address) {
  Memory* memories = tracer->trace->memories;
  u32 recent = tracer->recent;
  if (address - u64(memories[recent].reserved) < memories[recent].reserved_bytes)
    return recent;
  for (u32 number = 0; number < tracer->trace->memory_count; ++number)
    if (address - u64(memories[number].reserved) < memories[number].reserved_bytes)
      return tracer->recent = number;
  return kNowhere;
}

// Waits until the other lanes have as much to tell, so that they can be put together.
__attribute__((noinline)) void make_room(Worker* worker, Self self) {
  self.simdgroup().full |= 1u << self.lane();
  give_way(worker, self.index);
}

inline void note(Worker* worker, Self self, u32 memory, u64 offset, u32 bytes,
                 Kind kind, u32 site) {
  Tracer* tracer = worker->tracer;
  if (tracer->lengths[self.index] == kLogLength) make_room(worker, self);
  u64 at = tracer->lengths[self.index]++;
  tracer->logs[self.index * kLogLength + at] = {offset,     site, memory,
                                                u16(bytes), kind, 0};
}

__attribute__((noinline)) void in_threadgroup(Worker* worker, Self self, u64 address,
                                              u32 bytes, Kind kind, u32 site) {
  const ThreadgroupArray* array = threadgroup_array_at(worker, address);
  if (!array) return;  // the guards find it
  u64 offset = address - u64(array->begin), first;
  if (leaves(offset, bytes, array->bytes, first))
    outside(worker, self.index, array, u64(array->begin) + first, kind, site);
  u32 memory = kFirstThreadgroupMemory + u32(array - worker->arrays);
  check_access(worker, self.index, memory, offset, bytes, kind, site);
  note(worker, self, memory, offset, bytes, kind, site);
}

inline void access(u64 address, u32 bytes, Kind kind, const void* caller) {
  Self self = emu::self();
  u64 inside = address - (u64(self.worker) - kWorkerOffset);
  if (inside < kWorkerOffset) return;  // private memory
  Worker* worker = worker_of(self);
  Tracer* tracer = worker->tracer;
  if (tracer->doubt.count) settle(worker);
  u32 site = site_of(tracer->trace, caller);
  if (inside < kRegionBytes) {
    if (address >= u64(worker->threadgroup_memory))
      in_threadgroup(worker, self, address, bytes, kind, site);
    return;  // or a meeting's own memory
  }
  u32 number = find_memory(tracer, address);
  if (number == kNowhere) return;  // a table of constants
  const Memory& memory = tracer->trace->memories[number];
  u64 offset = address - u64(memory.begin), first;
  if (leaves(offset, bytes, memory.bytes, first))
    outside(worker, self.index, nullptr, u64(memory.begin) + first, kind, site);
  if (memory.cells) check_access(worker, self.index, number, offset, bytes, kind, site);
  note(worker, self, number, offset, bytes, kind, site);
}

// As many accesses as it takes, 16 bytes at most.
void range(const void* address, u64 bytes, Kind kind, const void* caller) {
  for (u64 at = 0; at < bytes; at += 16)
    access(u64(address) + at, u32(bytes - at < 16 ? bytes - at : 16), kind, caller);
}

}  // namespace

#define ACCESS(bytes)                                                       \
  extern "C" MSLEMU_EXPORT void __tsan_read##bytes(void* address) {         \
    access(u64(address), bytes, Kind::kRead, __builtin_return_address(0));  \
  }                                                                         \
  extern "C" MSLEMU_EXPORT void __tsan_write##bytes(void* address) {        \
    access(u64(address), bytes, Kind::kWrite, __builtin_return_address(0)); \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
#define ACCESS(bytes)                                                          \
  extern "C" MSLEMU_EXPORT void __tsan_unaligned_read##bytes(void* address) {  \
    access(u64(address), bytes, Kind::kRead, __builtin_return_address(0));     \
  }                                                                            \
  extern "C" MSLEMU_EXPORT void __tsan_unaligned_write##bytes(void* address) { \
    access(u64(address), bytes, Kind::kWrite, __builtin_return_address(0));    \
  }
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

extern "C" {
MSLEMU_EXPORT void __tsan_init() {}
MSLEMU_EXPORT void* __tsan_memcpy(void* to, const void* from, u64 bytes) {
  range(from, bytes, Kind::kRead, __builtin_return_address(0));
  range(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return memcpy(to, from, bytes);
}
MSLEMU_EXPORT void* __tsan_memmove(void* to, const void* from, u64 bytes) {
  range(from, bytes, Kind::kRead, __builtin_return_address(0));
  range(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return memmove(to, from, bytes);
}
MSLEMU_EXPORT void* __tsan_memset(void* to, int value, u64 bytes) {
  range(to, bytes, Kind::kWrite, __builtin_return_address(0));
  return memset(to, value, bytes);
}

MSLEMU_EXPORT void mslemu_atomic(const volatile void* address, u32 bytes, u32 does) {
  Kind kind = does == kAtomicLoads    ? Kind::kAtomicRead
              : does == kAtomicStores ? Kind::kAtomicWrite
                                      : Kind::kAtomicUpdate;
  access(u64(address), bytes, kind, __builtin_return_address(0));
  Self self = emu::self();
  order_atomic(worker_of(self), self.index, address, does);
}
MSLEMU_EXPORT void mslemu_atomic_done(const volatile void* address, u32 does) {
  Self self = emu::self();
  order_atomic_done(worker_of(self), self.index, address, does);
}
MSLEMU_EXPORT void mslemu_fence(u32 flags, u32 order, u32 scope) {
  Self self = emu::self();
  order_fence(worker_of(self), self.index, flags, order, scope);
}
MSLEMU_EXPORT void mslemu_order_simdgroup(u32 flags) {
  Self self = emu::self();
  worker_of(self)->tracer->flags[self.index / kLanes] = flags;
}
}

void emu::trace_calls(Report& report, Worker* worker, const void* site) {
  auto note = [&](u64 address) {
    if (report.trace_length < kMaxTrace)
      report.trace[report.trace_length++] = reinterpret_cast<const void*>(address);
  };
  // As a signal reports it: the place itself, then a guess that is none here.
  note(u64(site) - 1);
  note(0);
  u64 low = u64(worker->region), high = u64(&worker->view);
  bool above = false;
  auto* frame = static_cast<u64*>(__builtin_frame_address(0));
  while (u64(frame) >= low && u64(frame) + 16 <= high && u64(frame) % 8 == 0) {
    if (above) note(frame[1]);
    above |= frame[1] == u64(site);
    if (frame[0] <= u64(frame)) break;
    frame = reinterpret_cast<u64*>(frame[0]);
  }
}
