// Where threads meet: simdgroup operations and threadgroup barriers.
#include "trace.h"

using namespace emu;

namespace {

const void* place_of(const Launch* launch, const void* site) {
  for (u64 at = 0; at < launch->copy_count; ++at)
    if (launch->copies[at].site == site) return launch->copies[at].place;
  return site;
}

// Lanes that meet must come from the same call in the source.
[[noreturn]] void mismatch(Worker* worker, Self self, const void* other) {
  Report report = report_of(worker, Fault::kMismatch, self.index);
  report.site = worker->waits[self.index].site;
  report.other_site = other;
  abandon(worker, report);
}

// Metal wants all threads at the same barrier.
[[noreturn]] void barriers_differ(Worker* worker, Self self, const void* site) {
  Report report = report_of(worker, Fault::kBarrierSites, self.index);
  report.site = site;
  report.other_site = worker->barrier_site;
  trace_calls(report, worker, site);
  abandon(worker, report);
}

void trace_arrival(Worker* worker, Self self, const void* site) {
  Simdgroup& group = self.simdgroup();
  if (worker->stopped == 0) worker->barrier_site = site;
  if (!same_place(worker, worker->barrier_site, site))
    barriers_differ(worker, self, site);
  if (group.stopped == group.exist)
    tracer_met(worker, self.index / kLanes, nullptr, site);
}

}  // namespace

bool emu::same_place(const Worker* worker, const void* a, const void* b) {
  return a == b || place_of(worker->launch, a) == place_of(worker->launch, b);
}

void emu::misuse(Self self, const char* what, const void* site) {
  Worker* worker = worker_of(self);
  Report report = report_of(worker, Fault::kMisuse, self.index);
  report.text = what;
  report.trace[0] = site;
  report.trace_length = 1;
  abandon(worker, report);
}

extern "C" void mslemu_no_lane(const Operation* operation, u32 lane) {
  Self self = emu::self();
  Worker* worker = worker_of(self);
  Report report = report_of(worker, Fault::kNoLane, self.index);
  report.text = operation->name;
  report.amount = lane;
  report.trace[0] = __builtin_return_address(0);
  report.trace_length = 1;
  abandon(worker, report);
}

extern "C" bool mslemu_arrive(const Operation* operation) {
  return mslemu_arrive_from(operation, __builtin_return_address(0));
}

extern "C" bool mslemu_arrive_from(const Operation* operation, const void* site) {
  Self self = emu::self();
  Worker* worker = worker_of(self);
  Simdgroup& group = self.simdgroup();
  u32 bit = 1u << self.lane();
  if (!group.waiting) {
    group.site = site;
    if (operation->whole_simdgroup && ~group.exist) misuse(self, operation->name, site);
  }
  group.waiting |= bit;
  if (!same_place(worker, group.site, site)) {
    worker->waits[self.index] = {site, operation};
    mismatch(worker, self, group.site);
  }
  if (group.waiting == group.exist) {
    group.waiting = 0;
    group.ready |= group.exist & ~bit;
    worker->moved = true;
    if (worker->tracer) tracer_met(worker, self.index / kLanes, operation, site);
    return true;
  }
  worker->waits[self.index] = {site, operation};
  give_way(worker, self.index);
  return false;
}

extern "C" void mslemu_threadgroup_barrier(u32 flags) {
  Self self = emu::self();
  Worker* worker = worker_of(self);
  Simdgroup& group = self.simdgroup();
  u32 bit = 1u << self.lane();
  const void* site = __builtin_return_address(0);
  worker->waits[self.index] = {site, nullptr};
  if (!group.stopped) group.barrier_site = site;
  group.stopped |= bit;
  if (!same_place(worker, group.barrier_site, site))
    mismatch(worker, self, group.barrier_site);
  if (worker->tracer) trace_arrival(worker, self, site);
  worker->stopped += 1;
  u32 threads = worker->view.threadgroup.threads;
  if (worker->stopped == threads) {
    worker->stopped = 0;
    worker->moved = true;
    if (worker->tracer) tracer_barrier(worker, flags, site);
    for (u32 number = 0; number * kLanes < threads; ++number) {
      Simdgroup& other = worker->view.simdgroups[number];
      other.ready |= other.stopped;
      other.stopped = 0;
    }
    group.ready &= ~bit;
    return;
  }
  give_way(worker, self.index);
}
