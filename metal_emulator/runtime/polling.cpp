// Threads that wait for an atomic to change. A fiber that reads the same again and again
// lets the others run; when nobody has anything else to do, that is a livelock.
#include "runtime.h"

using namespace emu;

namespace {

constexpr u32 kBurst = 64;  // polls without news before others run

// Whether the thread has read the same there before, remembered either way.
bool again(Worker* worker, u32 thread, const void* site, const volatile void* address,
           u64 value) {
  auto& polls = worker->polls[thread];
  for (auto& poll : polls) {
    if (poll.site != site || poll.address != address) continue;
    bool same = poll.value == value;
    poll.value = value;
    return same;
  }
  for (u32 at = kPolls - 1; at > 0; --at) polls[at] = polls[at - 1];
  polls[0] = {site, address, value};
  return false;
}

[[noreturn]] void livelock(Worker* worker, u32 thread, const void* site) {
  Report report = report_of(worker, Fault::kLivelock, thread);
  trace_calls(report, worker, site);
  abandon(worker, report);
}

}  // namespace

extern "C" void mslemu_poll(const volatile void* address, u64 before, u64 after) {
  Self self = emu::self();
  Worker* worker = worker_of(self);
  const void* site = __builtin_return_address(0);
  u32& streak = worker->streaks[self.index];
  if (before != after || !again(worker, self.index, site, address, before)) {
    worker->moved = true;
    worker->condemned = false;
    streak = 0;
    return;
  }
  if (worker->condemned) livelock(worker, self.index, site);
  if (++streak < kBurst) return;
  streak = 0;
  self.simdgroup().polling |= 1u << self.lane();
  give_way(worker, self.index);
}
