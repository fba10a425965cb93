// The order that atomics and fences make in device memory, as in C++: what a thread did
// before a release fence is known to a thread that reads, with an atomic, what the
// first one wrote behind the fence with an atomic, and then passes an acquire fence.
// Barriers hand such knowledge on to the threads that they order.
#include "system.h"
#include "trace.h"

namespace emu {

// How far a thread knows what a threadgroup has done: all before `epoch`; in that epoch
// what `thread` did up to `tick`, and its simdgroup before `step`.
struct Known {
  u32 epoch;
  u32 step;
  u32 tick;
  u16 thread;
  u16 reach;  // 0: nothing is known
};

// What an atomic variable hands over. Known[groups], or null.
struct Location {
  const volatile void* address;
  Known* known;
};

namespace {

constexpr u32 kLocations = 1 << 16;
constexpr u32 kAcquire = 2, kRelease = 3, kAcquireRelease = 4, kSequential = 5;
constexpr u32 kScopeDevice = 3;

u64 vector_bytes(const Worker* worker) {
  const Coordinates& count = worker->view.threadgroup.count;
  return u64(count.x) * count.y * count.z * sizeof(Known);
}

Known* vector_at(const Worker* worker, Known*& known) {
  if (!known) {
    known = static_cast<Known*>(malloc(vector_bytes(worker)));
    memset(known, 0, vector_bytes(worker));
  }
  return known;
}

void forget(Known*& known) {
  free(known);
  known = nullptr;
}

void join(Known& known, const Known& more) {
  if (!more.reach) return;
  bool later = more.epoch > known.epoch;
  if (more.epoch == known.epoch)
    later =
        more.thread == known.thread ? more.tick > known.tick : more.step > known.step;
  if (!known.reach || later) known = more;
}

// All threadgroups, or only `own` if the fence reaches no further.
void join_all(Worker* worker, Known*& known, const Known* more, bool device) {
  if (!more) return;
  Known* into = vector_at(worker, known);
  u32 own = worker->tracer->group;
  if (!device) return join(into[own], more[own]);
  for (u64 group = 0; group < vector_bytes(worker) / sizeof(Known); ++group)
    join(into[group], more[group]);
}

bool reaches(const Known* vector, const Access& earlier, const Access& now) {
  if (!vector) return false;
  const Known& known = vector[earlier.group];
  if (!known.reach || (earlier.group != now.group && known.reach < kScopeDevice))
    return false;
  if (earlier.epoch != known.epoch) return earlier.epoch < known.epoch;
  if (earlier.thread == known.thread && earlier.other == known.thread)
    return earlier.tick <= known.tick;
  return earlier.thread / kLanes == known.thread / kLanes && earlier.step < known.step;
}

// Held by one thread at a time, for the operation and what we make of it; not waited
// for once the launch has failed, perhaps with the lock held.
void lock(Worker* worker) {
  u8* flag = &worker->tracer->trace->order_lock;
  while (__atomic_test_and_set(flag, __ATOMIC_ACQUIRE))
    if (__atomic_load_n(&worker->launch->stop, __ATOMIC_RELAXED)) return;
}

void unlock(Worker* worker) {
  __atomic_clear(&worker->tracer->trace->order_lock, __ATOMIC_RELEASE);
}

// Null for threadgroup memory, and when there are too many atomic variables.
Location* location_of(Worker* worker, const volatile void* address) {
  Trace* trace = worker->tracer->trace;
  if (threadgroup_array_at(worker, u64(address))) return nullptr;
  u64 at = u64(address) * 0x9E3779B97F4A7C15ull >> 48;
  for (u32 tried = 0; tried < kLocations; ++tried, ++at) {
    Location& location = trace->locations[at % kLocations];
    if (!location.address) location.address = address;
    if (location.address == address) return &location;
  }
  return nullptr;
}

void release(Worker* worker, u32 thread, bool device) {
  Tracer* tracer = worker->tracer;
  u32 simdgroup = thread / kLanes;
  Known*& released = tracer->released[thread];
  forget(released);
  join_all(worker, released, tracer->known, device);
  join_all(worker, released, tracer->simdgroup_known[simdgroup], device);
  join_all(worker, released, tracer->acquired[thread], device);
  vector_at(worker, released)[tracer->group] = {
      tracer->epochs[0], tracer->steps[simdgroup][0], tracer->ticks[thread]++,
      u16(thread), u16(device ? kScopeDevice : 1)};
}

}  // namespace

u64 locations_bytes() { return kLocations * sizeof(Location); }

void order_close(Trace* trace) {
  for (u32 at = 0; trace->locations && at < kLocations; ++at)
    forget(trace->locations[at].known);
}

void order_begin(Worker* worker) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  tracer->ordered = false;
  forget(tracer->known);
  for (Known*& known : tracer->simdgroup_known) forget(known);
  for (u32 thread = 0; thread < kMaxThreads; ++thread) {
    forget(tracer->acquired[thread]);
    forget(tracer->seen[thread]);
    forget(tracer->released[thread]);
    tracer->ticks[thread] = 0;
  }
}

bool is_ordered(const Worker* worker, const Access& earlier, const Access& now) {
  const Tracer* tracer = worker->tracer;
  return tracer->ordered &&
         (reaches(tracer->known, earlier, now) ||
          reaches(tracer->simdgroup_known[now.thread / kLanes], earlier, now) ||
          reaches(tracer->acquired[now.thread], earlier, now));
}

void order_simdgroup(Worker* worker, u32 simdgroup) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  for (u32 lane = 0; lane < kLanes; ++lane)
    join_all(worker, tracer->simdgroup_known[simdgroup],
             tracer->acquired[simdgroup * kLanes + lane], true);
}

void order_threadgroup(Worker* worker) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  for (u32 simdgroup = 0; simdgroup < kMaxSimdgroups; ++simdgroup) {
    order_simdgroup(worker, simdgroup);
    join_all(worker, tracer->known, tracer->simdgroup_known[simdgroup], true);
  }
}

void order_atomic(Worker* worker, u32 thread, const volatile void* address, u32 does) {
  lock(worker);
  if (!(does & kAtomicStores)) return;
  Location* location = location_of(worker, address);
  if (!location) return;
  // A store that does not read ends what earlier ones handed over.
  if (!(does & kAtomicLoads)) forget(location->known);
  join_all(worker, location->known, worker->tracer->released[thread], true);
}

void order_atomic_done(Worker* worker, u32 thread, const volatile void* address,
                       u32 does) {
  Tracer* tracer = worker->tracer;
  Location* location = location_of(worker, address);
  if (location && location->known && does & kAtomicLoads) {
    tracer->ordered = true;
    join_all(worker, tracer->seen[thread], location->known, true);
  }
  unlock(worker);
}

void order_fence(Worker* worker, u32 thread, u32 flags, u32 order, u32 scope) {
  Tracer* tracer = worker->tracer;
  if (!(flags & kOrdersDevice)) return;
  tracer->ordered = true;
  bool device = scope == kScopeDevice;
  if (order == kAcquire || order >= kAcquireRelease)
    join_all(worker, tracer->acquired[thread], tracer->seen[thread], device);
  if (order >= kRelease && order <= kSequential) release(worker, thread, device);
}

}  // namespace emu
