// Races and reads of bytes that nobody has written. Every byte of memory that a kernel
// may write remembers who touched it last, and under which barriers.
#include "trace.h"

namespace emu {

namespace {

// Guards the cells of 64 neighbouring bytes of device memory.
struct Lock {
  u8* flag;

  Lock(Trace* trace, u64 offset) : flag(&trace->locks[offset / 64 % kLocks]) {
    while (__atomic_test_and_set(flag, __ATOMIC_ACQUIRE)) {
    }
  }
  void release() { __atomic_clear(flag, __ATOMIC_RELEASE); }
};

bool together(const Access& a, const Access& b) {
  return a.group == b.group && a.thread / kLanes == b.thread / kLanes;
}

// Whether nothing keeps the earlier access and the later one of one launch apart.
bool collide(const Access& earlier, const Access& now) {
  if (!earlier.site) return false;
  if (earlier.group != now.group) return true;
  if (earlier.epoch < now.epoch) return false;
  if (earlier.thread == now.thread && earlier.other == now.thread) return false;
  return !together(earlier, now) || earlier.step == now.step;
}

void remember_read(Cell& cell, const Access& now) {
  Access& read = cell.read;
  if (read.site && read.group != now.group) {
    cell.apart = read;
    cell.elsewhere.site = 0;
  } else if (read.site && !together(read, now)) {
    cell.elsewhere = read;
  } else if (read.site && read.epoch == now.epoch && read.step == now.step) {
    if (read.thread != now.thread) read.other = now.thread;
    return;
  }
  read = now;
}

// The access that collides with this one, or null. Atomics never collide with atomics.
const Access* collision(const Worker* worker, const Cell& cell, const Access& now,
                        Kind kind, bool shared) {
  auto wrong = [&](const Access& earlier) {
    return collide(earlier, now) && !is_ordered(worker, shared, earlier, now);
  };
  if (wrong(cell.write)) return &cell.write;
  if (!is_atomic(kind) && wrong(cell.atomic)) return &cell.atomic;
  if (!modifies(kind)) return nullptr;
  const Access* reads[] = {&cell.read, &cell.elsewhere, &cell.apart};
  for (const Access* read : reads)
    if (wrong(*read)) return read;
  return nullptr;
}

struct Place {
  u32 thread;
  u32 memory;
  u64 offset;
  u32 site;
  bool writes;
};

Report describe(Worker* worker, Fault fault, const Place& place) {
  Report report = report_of(worker, fault, place.thread);
  const Trace* trace = worker->tracer->trace;
  report.is_write = place.writes;
  if (place.memory >= kFirstThreadgroupMemory) {
    report.text = worker->arrays[place.memory - kFirstThreadgroupMemory].name;
    report.address = place.offset;
  } else {
    report.address = u64(trace->memories[place.memory].begin) + place.offset;
  }
  trace_calls(report, worker, trace->library + place.site);
  return report;
}

Coordinates position_of(const Threadgroup& here, u32 number) {
  return {number % here.count.x, number / here.count.x % here.count.y,
          number / here.count.x / here.count.y};
}

// A write by the first of two colliding accesses is named as one.
Report describe_race(Worker* worker, const Place& place, const Access& earlier,
                     bool earlier_writes) {
  Report report = describe(worker, Fault::kRace, place);
  report.other_is_write = earlier_writes;
  report.other_thread = earlier.thread == place.thread ? earlier.other : earlier.thread;
  report.other_threadgroup = position_of(worker->view.threadgroup, earlier.group);
  report.site = worker->tracer->trace->library + place.site;
  report.other_site = worker->tracer->trace->library + earlier.site;
  return report;
}

// A store by several lanes of a simdgroup at once: harmless if they store one value.
bool same_store(const Worker* worker, const Access& earlier, const Access& now) {
  const u8* library = worker->tracer->trace->library;
  return together(earlier, now) &&
         same_place(worker, library + earlier.site, library + now.site) &&
         earlier.epoch == now.epoch && earlier.step == now.step;
}

void doubt(Worker* worker, const Place& place, const Access& earlier) {
  Doubt& doubt = worker->tracer->doubt;
  if (!doubt.count) doubt.report = describe_race(worker, place, earlier, true);
  const u8* begin = place.memory < kFirstThreadgroupMemory
                        ? worker->tracer->trace->memories[place.memory].begin
                        : worker->arrays[place.memory - kFirstThreadgroupMemory].begin;
  doubt.bytes[doubt.count] = begin + place.offset;
  doubt.values[doubt.count++] = begin[place.offset];
}

// Judges one byte and remembers the access. False: the worker's fault says why.
bool touch(Worker* worker, Cell& cell, const Access& now, Kind kind, bool has_value,
           const Place& place) {
  bool shared = place.memory >= kFirstThreadgroupMemory;
  const Access* earlier = collision(worker, cell, now, kind, shared);
  if (earlier == &cell.write && kind == Kind::kWrite && same_store(worker, *earlier, now)) {
    doubt(worker, place, *earlier);
    Cell others = cell;
    others.write.site = 0;
    if (!collision(worker, others, now, kind, shared)) earlier = nullptr;
  }
  if (earlier) {
    bool wrote = earlier == &cell.write || earlier == &cell.atomic;
    worker->fault = describe_race(worker, place, *earlier, wrote);
    return false;
  }
  if (reads(kind) && !cell.write.site && !cell.atomic.site && !has_value) {
    worker->fault = describe(worker, Fault::kPoison, place);
    return false;
  }
  if (kind == Kind::kWrite) cell.write = now;
  if (is_atomic(kind) && modifies(kind)) cell.atomic = now;
  if (kind == Kind::kRead) remember_read(cell, now);
  return true;
}

// What another threadgroup did here, it did to other memory.
void forget_others(Cell& cell, u32 group) {
  Access* all[] = {&cell.write, &cell.read, &cell.elsewhere, &cell.atomic};
  for (Access* access : all)
    if (access->group != group) access->site = 0;
}

}  // namespace

void check_access(Worker* worker, u32 thread, u32 memory, u64 offset, u32 bytes,
                  Kind kind, u32 site) {
  Tracer* tracer = worker->tracer;
  bool shared = memory >= kFirstThreadgroupMemory;
  Access now{site,
             tracer->group,
             tracer->epochs[shared],
             tracer->steps[thread / kLanes][shared],
             tracer->ticks[thread],
             u16(thread),
             u16(thread)};
  bool fine = true;
  if (shared) {
    u64 slot = memory - kFirstThreadgroupMemory;
    Cell* cells = tracer->threadgroup_cells + slot * kThreadgroupLimit;
    for (u64 at = offset; fine && at < offset + bytes; ++at) {
      forget_others(cells[at], now.group);
      Place place{thread, memory, at, site, modifies(kind)};
      fine = touch(worker, cells[at], now, kind, false, place);
    }
  } else {
    const Memory& here = tracer->trace->memories[memory];
    for (u64 at = offset; fine && at < offset + bytes; ++at) {
      Lock lock(tracer->trace, at);
      Place place{thread, memory, at, site, modifies(kind)};
      fine = touch(worker, here.cells[at], now, kind, here.written, place);
      lock.release();
    }
  }
  if (!fine) abandon(worker, worker->fault);
}

void settle(Worker* worker) {
  Doubt& doubt = worker->tracer->doubt;
  u32 count = doubt.count;
  doubt.count = 0;
  for (u32 at = 0; at < count; ++at)
    if (*doubt.bytes[at] != doubt.values[at]) abandon(worker, doubt.report);
}

}  // namespace emu
