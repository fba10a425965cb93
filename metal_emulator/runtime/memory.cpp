// Guarded memory: device buffers, fiber stacks, threadgroup arrays.
//
// A buffer ends within 16 bytes of a page that nobody may touch, and far guards lie on
// both sides, so that a wrong index faults instead of finding another buffer.
#include "runtime.h"
#include "system.h"

namespace emu {

namespace {

constexpr u64 kGuardBytes = 1ull << 31;

u64 whole_pages(u64 bytes) {
  u64 page = u64(getpagesize());
  return (bytes + page - 1) / page * page;
}

u8* reserve(u64 bytes) {
  void* address =
      mmap(nullptr, bytes, kProtNone, kMapPrivate | kMapAnonymous | kMapReserve, -1, 0);
  return address == kMapFailed ? nullptr : static_cast<u8*>(address);
}

u8* reserve_aligned(u64 bytes) {
  u8* address = reserve(2 * bytes);
  if (!address) return nullptr;
  u8* aligned = reinterpret_cast<u8*>((u64(address) + bytes - 1) & ~(bytes - 1));
  if (aligned > address) munmap(address, aligned - address);
  munmap(aligned + bytes, address + bytes - aligned);
  return aligned;
}

int anonymous_file(u64 bytes) {
#if defined(__APPLE__)
  char name[] = "/mslemu-00000000";
  u32 number = u32(getpid());
  for (int at = 15; at > 7; --at, number /= 10) name[at] = char('0' + number % 10);
  int fd = shm_open(name, 0x0202 | 0x0800, 0600);  // O_RDWR | O_CREAT | O_EXCL
  if (fd >= 0) shm_unlink(name);
#else
  int fd = memfd_create("mslemu", 1);  // MFD_CLOEXEC
#endif
  if (fd >= 0 && ftruncate(fd, long(bytes)) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

}  // namespace

// Layout shared with engine.py (ctypes). `host` and `device` are two mappings of the
// same pages: the kernel's may be read-only.
struct Region {
  u8* host;
  u8* device;
  u64 bytes;
  u8* reserved;
  u64 reserved_bytes;
};

struct Span {
  u8* begin;
  u8* end;
};

// Where `bytes` bytes lie whose address is `residue` modulo 16: as late as possible.
Span span_of(const Region* region, u64 bytes, u32 residue) {
  u64 last = region->bytes - bytes;
  u64 begin = last - (last + 16 - residue) % 16;
  return {region->host + begin, region->host + begin + bytes};
}

constexpr u32 kMaxWorkers = 1024;
Worker* workers[kMaxWorkers];

Worker* worker_at(u64 stack) {
  for (Worker* worker : workers) {
    if (!worker) return nullptr;
    if (stack - u64(worker->region) < kMaxThreads * kStackBytes) return worker;
  }
  return nullptr;
}

Worker* worker_number(u32 number) {
  return number < kMaxWorkers ? workers[number] : nullptr;
}

Worker* worker_open(u32 number) {
  if (number >= kMaxWorkers) return nullptr;
  if (workers[number]) return workers[number];
  u8* region = reserve_aligned(kRegionBytes);
  if (!region) return nullptr;
  u64 page = u64(getpagesize());
  u64 lower = page;  // the guard below each stack
  for (u32 index = 0; index < kMaxThreads; ++index)
    mprotect(region + index * kStackBytes + lower, kStackBytes - lower, kProtReadWrite);
  u8* state = region + kWorkerOffset;
  u64 state_bytes = whole_pages(sizeof(Worker));
  u64 signal_bytes = whole_pages(64 << 10);
  if (mprotect(state, state_bytes + signal_bytes, kProtReadWrite)) return nullptr;
  auto* worker = reinterpret_cast<Worker*>(state);
  worker->region = region;
  worker->signal_stack = state + state_bytes;
  worker->threadgroup_memory = state + state_bytes + signal_bytes + page;
  workers[number] = worker;
  return worker;
}

void threadgroup_memory_begin(Worker* worker) {
  worker->threadgroup_bytes = 0;
  for (ThreadgroupArray& array : worker->arrays) array.begin = nullptr;
}

namespace {

u8* array_end(Worker* worker, u32 slot) {
  return worker->threadgroup_memory + slot * kThreadgroupStride +
         kThreadgroupStride / 2;
}

void place_array(Worker* worker, ThreadgroupArray& array, u32 slot, u64 bytes) {
  u8* end = array_end(worker, slot);
  u64 mapped = whole_pages(bytes);
  if (array.mapped > mapped)
    mprotect(end - array.mapped, array.mapped - mapped, kProtNone);
  if (array.mapped < mapped) mprotect(end - mapped, mapped, kProtReadWrite);
  array.mapped = mapped;
  array.bytes = bytes;
  array.begin = end - (bytes + 15) / 16 * 16;
  memset(end - mapped, kPoison, mapped);
}

bool all_poison(const u8* begin, const u8* end) {
  for (; begin < end; ++begin)
    if (*begin != kPoison) return false;
  return true;
}

}  // namespace

bool threadgroup_memory_intact(Worker* worker, const char** name) {
  for (u32 slot = 0; slot < kThreadgroupSlots; ++slot) {
    const ThreadgroupArray& array = worker->arrays[slot];
    if (!array.begin) continue;
    u8* end = array_end(worker, slot);
    if (all_poison(end - array.mapped, array.begin) &&
        all_poison(array.begin + array.bytes, end))
      continue;
    *name = array.name;
    return false;
  }
  return true;
}

const ThreadgroupArray* threadgroup_array_at(const Worker* worker, u64 address) {
  u64 slot = (address - u64(worker->threadgroup_memory)) / kThreadgroupStride;
  if (slot >= kThreadgroupSlots || !worker->arrays[slot].begin) return nullptr;
  return &worker->arrays[slot];
}

}  // namespace emu

using namespace emu;

extern "C" void* mslemu_threadgroup_memory(u32 slot, u64 bytes, const char* name) {
  Self self = emu::self();
  Worker* worker = worker_of(self);
  if (slot >= kThreadgroupSlots)
    misuse(self, "more than 64 threadgroup variables", __builtin_return_address(0));
  ThreadgroupArray& array = worker->arrays[slot];
  if (!array.begin) {
    worker->threadgroup_bytes += bytes;
    if (worker->threadgroup_bytes > kThreadgroupLimit) {
      Report report = report_of(worker, Fault::kThreadgroupLimit, self.index);
      report.text = name;
      report.amount = worker->threadgroup_bytes;
      report.trace[0] = __builtin_return_address(0);
      report.trace_length = 1;
      abandon(worker, report);
    }
    place_array(worker, array, slot, bytes);
    array.name = name;
    array.run = worker->run;
  }
  if (array.run != worker->run) {
    memset(array.begin, kPoison, bytes);
    array.run = worker->run;
  }
  return array.begin;
}

extern "C" MSLEMU_EXPORT int mslemu_region_open(Region* region, u64 bytes,
                                                int writable) {
  bytes = whole_pages(bytes);
  u64 reserved_bytes = bytes + 2 * kGuardBytes;
  u8* reserved = reserve(reserved_bytes);
  if (!reserved) return 1;
  u8* device = reserved + kGuardBytes;
  u8* host = device;
  if (writable) {
    if (mprotect(device, bytes, kProtReadWrite)) return 1;
  } else {
    int fd = anonymous_file(bytes);
    if (fd < 0) return 1;
    void* seen = mmap(device, bytes, kProtRead, kMapShared | kMapFixed, fd, 0);
    void* mine = mmap(nullptr, bytes, kProtReadWrite, kMapShared, fd, 0);
    close(fd);
    if (seen == kMapFailed || mine == kMapFailed) return 1;
    host = static_cast<u8*>(mine);
  }
  *region = {host, device, bytes, reserved, reserved_bytes};
  return 0;
}

extern "C" MSLEMU_EXPORT void mslemu_region_close(Region* region) {
  if (region->host != region->device) munmap(region->host, region->bytes);
  munmap(region->reserved, region->reserved_bytes);
}

// Puts `bytes` bytes (poison if `source` is null) into the region, poison around them.
// Returns the address that the kernel gets.
extern "C" MSLEMU_EXPORT void* mslemu_place(const Region* region, const void* source,
                                            u64 bytes, u32 residue) {
  Span span = span_of(region, bytes, residue);
  memset(region->host, kPoison, span.begin - region->host);
  memset(span.end, kPoison, region->host + region->bytes - span.end);
  if (source)
    memcpy(span.begin, source, bytes);
  else
    memset(span.begin, kPoison, bytes);
  return region->device + (span.begin - region->host);
}

// 0 if the poison around the bytes is intact, else 1 (before) or 2 (after).
extern "C" MSLEMU_EXPORT int mslemu_canary(const Region* region, u64 bytes,
                                           u32 residue) {
  Span span = span_of(region, bytes, residue);
  if (!all_poison(region->host, span.begin)) return 1;
  return all_poison(span.end, region->host + region->bytes) ? 0 : 2;
}
