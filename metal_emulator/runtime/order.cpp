// The order that atomics and fences make, as in C++: what a thread did before a release
// fence is known to a thread that reads, with an atomic, what the first one wrote behind
// the fence with an atomic, and then passes an acquire fence. Barriers hand such
// knowledge on to the threads that they order. A fence speaks of the memory in its flags:
// of accesses to it, and of atomics in it.
#include "system.h"
#include "trace.h"

namespace emu {

// How far a thread knows what a simdgroup has done: all before `epoch`, as its whole
// threadgroup; in that epoch what `thread` did up to `tick`, and all before `step`.
struct Known {
  u32 epoch;
  u32 step;
  u32 tick;
  u16 thread;
  u16 reach;  // 0: nothing is known
};

// What an atomic variable hands over, of each memory. Of every simdgroup, or null.
struct Location {
  const volatile void* address;
  Known* known[2];
};

namespace {

constexpr u32 kLocations = 1 << 16;
constexpr u32 kAcquire = 2, kRelease = 3, kAcquireRelease = 4, kSequential = 5;
constexpr u32 kScopeSimdgroup = 1, kScopeDevice = 3;

u32 simdgroups_each(const Worker* worker) {
  const Coordinates& size = worker->view.threadgroup.nominal;
  return (size.x * size.y * size.z + kLanes - 1) / kLanes;
}

u64 simdgroups_all(const Worker* worker) {
  const Coordinates& count = worker->view.threadgroup.count;
  return u64(count.x) * count.y * count.z * simdgroups_each(worker);
}

Known* vector_at(const Worker* worker, Known*& known) {
  if (!known) {
    u64 bytes = simdgroups_all(worker) * sizeof(Known);
    known = static_cast<Known*>(malloc(bytes));
    memset(known, 0, bytes);
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

// All threadgroups, or only its own if the fence reaches no further.
void join_all(Worker* worker, Known*& known, const Known* more, bool device) {
  if (!more) return;
  Known* into = vector_at(worker, known);
  u64 each = simdgroups_each(worker), own = worker->tracer->group * each;
  u64 begin = device ? 0 : own, end = device ? simdgroups_all(worker) : own + each;
  for (u64 at = begin; at < end; ++at) join(into[at], more[at]);
}

bool reaches(const Known& known, const Access& earlier, const Access& now) {
  if (!known.reach || (earlier.group != now.group && known.reach < kScopeDevice))
    return false;
  if (earlier.epoch != known.epoch) return earlier.epoch < known.epoch;
  if (earlier.thread == known.thread && earlier.other == known.thread)
    return earlier.tick <= known.tick;
  return earlier.thread / kLanes == known.thread / kLanes && earlier.step < known.step;
}

bool reaches(const Worker* worker, const Known* vector, const Access& earlier,
             const Access& now) {
  if (!vector) return false;
  u32 each = simdgroups_each(worker);
  for (u64 at = 0; at < each; ++at)
    if (reaches(vector[earlier.group * u64(each) + at], earlier, now)) return true;
  return false;
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

// Null when there are too many atomic variables.
Location* location_of(Worker* worker, const volatile void* address) {
  Trace* trace = worker->tracer->trace;
  u64 at = u64(address) * 0x9E3779B97F4A7C15ull >> 48;
  for (u32 tried = 0; tried < kLocations; ++tried, ++at) {
    Location& location = trace->locations[at % kLocations];
    if (!location.address) location.address = address;
    if (location.address == address) return &location;
  }
  return nullptr;
}

u32 memory_of(const Worker* worker, const volatile void* address) {
  return threadgroup_array_at(worker, u64(address)) != nullptr;
}

// What the thread did and knows of a memory goes to its next atomics in `place`.
void release(Worker* worker, u32 thread, u32 memory, u32 place, bool device) {
  Tracer* tracer = worker->tracer;
  u32 simdgroup = thread / kLanes;
  Known*& released = tracer->released[thread][memory][place];
  forget(released);
  join_all(worker, released, tracer->known[memory], device);
  join_all(worker, released, tracer->simdgroup_known[simdgroup][memory], device);
  join_all(worker, released, tracer->acquired[thread][memory], device);
  u64 own = u64(tracer->group) * simdgroups_each(worker) + simdgroup;
  vector_at(worker, released)[own] = {
      tracer->epochs[memory], tracer->steps[simdgroup][memory], tracer->ticks[thread],
      u16(thread), u16(device ? kScopeDevice : 1)};
}

}  // namespace

u64 locations_bytes() { return kLocations * sizeof(Location); }

void order_close(Trace* trace) {
  for (u32 at = 0; trace->locations && at < kLocations; ++at)
    for (Known*& known : trace->locations[at].known) forget(known);
}

void order_begin(Worker* worker) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  tracer->ordered = false;
  // Members that lie one behind the other.
  for (Known** at = tracer->known; at < &tracer->released[kMaxThreads][0][0]; ++at)
    forget(*at);
  for (u32& ticks : tracer->ticks) ticks = 0;
}

bool is_ordered(const Worker* worker, u32 memory, const Access& earlier,
                const Access& now) {
  const Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return false;
  u32 simdgroup = now.thread / kLanes;
  return reaches(worker, tracer->known[memory], earlier, now) ||
         reaches(worker, tracer->simdgroup_known[simdgroup][memory], earlier, now) ||
         reaches(worker, tracer->acquired[now.thread][memory], earlier, now);
}

void order_simdgroup(Worker* worker, u32 simdgroup, u32 memory) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  for (u32 lane = 0; lane < kLanes; ++lane)
    join_all(worker, tracer->simdgroup_known[simdgroup][memory],
             tracer->acquired[simdgroup * kLanes + lane][memory], true);
}

void order_threadgroup(Worker* worker, u32 memory) {
  Tracer* tracer = worker->tracer;
  if (!tracer->ordered) return;
  for (u32 simdgroup = 0; simdgroup < kMaxSimdgroups; ++simdgroup) {
    order_simdgroup(worker, simdgroup, memory);
    join_all(worker, tracer->known[memory], tracer->simdgroup_known[simdgroup][memory],
             true);
  }
}

void order_atomic(Worker* worker, u32 thread, const volatile void* address, u32 does) {
  lock(worker);
  Location* location = location_of(worker, address);
  if (!(does & kAtomicStores) || !location) return;
  u32 place = memory_of(worker, address);
  for (u32 memory = 0; memory < 2; ++memory) {
    Known*& known = location->known[memory];
    // A store that does not read ends what earlier ones handed over.
    if (!(does & kAtomicLoads)) forget(known);
    join_all(worker, known, worker->tracer->released[thread][memory][place], true);
  }
}

void order_atomic_done(Worker* worker, u32 thread, const volatile void* address,
                       u32 does) {
  Tracer* tracer = worker->tracer;
  Location* location = location_of(worker, address);
  u32 place = memory_of(worker, address);
  for (u32 memory = 0; memory < 2; ++memory) {
    if (!location || !location->known[memory] || !(does & kAtomicLoads)) continue;
    tracer->ordered = true;
    join_all(worker, tracer->seen[thread][memory][place], location->known[memory],
             true);
  }
  unlock(worker);
}

void order_fence(Worker* worker, u32 thread, u32 flags, u32 order, u32 scope) {
  if (scope <= kScopeSimdgroup) return;
  Tracer* tracer = worker->tracer;
  bool device = scope == kScopeDevice;
  bool acquires = order == kAcquire || order >= kAcquireRelease;
  bool releases = order >= kRelease && order <= kSequential;
  for (u32 memory = 0; memory < 2; ++memory)
    for (u32 place = 0; place < 2; ++place) {
      if (!orders(flags, memory) || !orders(flags, place)) continue;
      tracer->ordered = true;
      if (acquires)
        join_all(worker, tracer->acquired[thread][memory],
                 tracer->seen[thread][memory][place], device);
      if (releases) release(worker, thread, memory, place, device);
    }
  if (releases) tracer->ticks[thread] += 1;
}

}  // namespace emu
