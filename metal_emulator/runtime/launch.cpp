// Spreads the threadgroups of a launch over host threads, in shuffled order.
#include "float_mode.h"
#include "system.h"
#include "trace.h"

namespace emu {

namespace {

// Most launches of a test are done before another thread would have started.
constexpr u64 kPatienceNanoseconds = 100000;

// What it takes to call threads stuck that poll: rounds of all of them, and time.
constexpr u32 kRounds = 4096;
constexpr u64 kWaitNanoseconds = 500000000;
constexpr long kPause = 100000;  // nanoseconds
constexpr u64 kFinished = ~u64(0);

struct Order {
  u32* numbers;
  u32 count;
  u32 next;  // atomic
};

struct Crew;

// A host thread of a launch, and the threadgroups among which it may change.
struct Share {
  Crew* crew;
  Worker** residents;
  unsigned long thread;
  u64 stuck_at;  // atomic: `moves` when all it could do was to poll; 0: it does more
  u64 since;     // nanoseconds at which that began
  u32 rounds;    // how often all its threads have polled since
};

// The first share is the caller's own.
struct Crew {
  Launch* launch;
  Order order;
  Share* shares;
  u32 started;  // atomic
  u64 moves;    // atomic: counts what may be news to somebody who polls
};

u64 random(u64& state) {  // splitmix64
  u64 z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

void shuffle(Order& order, u64 seed) {
  for (u32 at = 0; at < order.count; ++at) order.numbers[at] = at;
  for (u32 left = order.count; left > 1; --left) {
    u32 other = u32(random(seed) % left);
    u32 kept = order.numbers[left - 1];
    order.numbers[left - 1] = order.numbers[other];
    order.numbers[other] = kept;
  }
}

bool stopped(const Share* share) {
  return __atomic_load_n(&share->crew->launch->stop, __ATOMIC_ACQUIRE);
}

void has_moved(Share* share) {
  __atomic_fetch_add(&share->crew->moves, 1, __ATOMIC_ACQ_REL);
  __atomic_store_n(&share->stuck_at, 0, __ATOMIC_RELEASE);
}

// A worker without a threadgroup takes one, if any is left.
bool has_work(Share* share, Worker* worker) {
  if (worker->began) return true;
  Order& order = share->crew->order;
  if (__atomic_load_n(&order.next, __ATOMIC_RELAXED) >= order.count) return false;
  u32 at = __atomic_fetch_add(&order.next, 1, __ATOMIC_RELAXED);
  if (at >= order.count) return false;
  begin_threadgroup(worker, order.numbers[at]);
  return true;
}

// Whether no host thread has anything to do but to poll what nobody changes.
bool all_stuck(const Crew* crew, u64 moves) {
  for (u32 at = 0; at < __atomic_load_n(&crew->started, __ATOMIC_ACQUIRE); ++at) {
    u64 stuck = __atomic_load_n(&crew->shares[at].stuck_at, __ATOMIC_ACQUIRE);
    if (stuck != moves && stuck != kFinished) return false;
  }
  return __atomic_load_n(&crew->moves, __ATOMIC_ACQUIRE) == moves;
}

// After a round in which all threads have polled and none has seen any news since
// `moves`. A loop that gives up after a while is granted that while.
void wait(Share* share, u64 moves) {
  u64 now = nanoseconds();
  if (share->stuck_at != moves) {
    share->rounds = 0;
    share->since = now;
    __atomic_store_n(&share->stuck_at, moves, __ATOMIC_RELEASE);
  }
  sched_yield();
  if (++share->rounds < kRounds || now - share->since < kWaitNanoseconds) return;
  if (!all_stuck(share->crew, moves)) return;
  for (u32 at = 0; at < share->crew->launch->resident; ++at)
    share->residents[at]->condemned = true;
}

// Runs the residents in turn, each until it ends or waits for others. False once
// nothing is left to run.
bool work_on(Share* share) {
  u64 moves = __atomic_load_n(&share->crew->moves, __ATOMIC_ACQUIRE);
  bool working = false, stuck = true;
  for (u32 at = 0; at < share->crew->launch->resident; ++at) {
    Worker* worker = share->residents[at];
    if (stopped(share)) return false;
    if (!has_work(share, worker)) continue;
    working = true;
    bool ended = resume_threadgroup(worker);
    if (!ended && !worker->moved) continue;
    has_moved(share);
    stuck = false;
  }
  if (working && stuck) wait(share, moves);
  return working;
}

u64 enter(Share* share) {
  signals_enter(share->residents[0]);
  for (u32 at = 0; at < share->crew->launch->resident; ++at) {
    share->residents[at]->host = pthread_self();
    threadgroup_memory_begin(share->residents[at]);
  }
  u64 mode = float_mode();
  set_float_mode(mode | kFlushing);
  return mode;
}

void leave(Share* share, u64 mode) {
  __atomic_store_n(&share->stuck_at, kFinished, __ATOMIC_RELEASE);
  set_float_mode(mode);
  for (u32 at = 0; at < share->crew->launch->resident; ++at)
    guard_forget(share->residents[at]);
  signals_leave(share->residents[0]);
}

void* help(void* argument) {
  auto* share = static_cast<Share*>(argument);
  u64 mode = enter(share);
  while (work_on(share)) {
  }
  leave(share, mode);
  return nullptr;
}

bool hire(Crew& crew, u32 number) {
  u32 resident = crew.launch->resident;
  Share& share = crew.shares[number];
  auto** residents = static_cast<Worker**>(malloc(resident * sizeof(Worker*)));
  share = {&crew, residents, 0, 0, 0, 0};
  if (!residents) return false;
  for (u32 at = 0; at < resident; ++at) {
    Worker* worker = residents[at] = worker_open(number * resident + at);
    if (!worker) return false;
    worker->launch = crew.launch;
    worker->tracer = nullptr;
    worker->attends = number == 0 && crew.launch->python;
    worker->began = 0;
    worker->condemned = false;
    if (crew.launch->trace && !tracer_open(worker)) return false;
  }
  return true;
}

// Starts as many threads as there is work for; fewer if the system refuses.
void call_for_help(Crew& crew) {
  u32 done = __atomic_load_n(&crew.order.next, __ATOMIC_RELAXED);
  u32 left = crew.order.count - done;
  u32 wanted = left < crew.launch->workers ? left : crew.launch->workers - 1;
  while (crew.started <= wanted && hire(crew, crew.started)) {
    Share* share = &crew.shares[crew.started];
    if (pthread_create(&share->thread, nullptr, help, share)) return;
    __atomic_fetch_add(&crew.started, 1, __ATOMIC_RELEASE);
  }
}

// Until all helpers are done. Who attends to signals cannot sleep in pthread_join.
void wait_for_helpers(const Crew& crew) {
  TimeSpec pause{0, kPause};
  for (u32 number = 1; number < crew.started; ++number) {
    const Share& share = crew.shares[number];
    while (crew.launch->python &&
           __atomic_load_n(&share.stuck_at, __ATOMIC_ACQUIRE) != kFinished) {
      attend(crew.launch);
      nanosleep(&pause, nullptr);
    }
    pthread_join(share.thread, nullptr);
  }
}

void lead(Crew& crew) {
  Share* mine = &crew.shares[0];
  u64 mode = enter(mine);
  crew.launch->float_mode = mode;
  u64 begin = nanoseconds();
  bool alone = crew.launch->workers > 1;
  while (work_on(mine)) {
    attend(crew.launch);
    if (!alone || nanoseconds() - begin < kPatienceNanoseconds) continue;
    alone = false;
    if (crew.order.next < crew.order.count) call_for_help(crew);
  }
  leave(mine, mode);
  wait_for_helpers(crew);
}

u32 threadgroups(const Launch* launch) {
  const Coordinates& grid = launch->grid;
  const Coordinates& size = launch->threadgroup;
  return (grid.x + size.x - 1) / size.x * ((grid.y + size.y - 1) / size.y) *
         ((grid.z + size.z - 1) / size.z);
}

void collect(Crew& crew) {
  for (u32 number = 0; number < crew.started; ++number)
    for (u32 at = 0; at < crew.launch->resident; ++at) {
      Worker* worker = crew.shares[number].residents[at];
      trace_collect(crew.launch->trace, worker);
      tracer_close(worker);
    }
}

// False if the system refuses memory or signal handlers.
bool run(Crew& crew) {
  if (!crew.order.numbers || !crew.shares || !hire(crew, 0)) return false;
  shuffle(crew.order, crew.launch->seed);
  if (!signals_begin()) return false;
  guard_begin(crew.launch);
  lead(crew);
  guard_end();
  signals_end();
  if (crew.launch->trace) collect(crew);
  return true;
}

}  // namespace

}  // namespace emu

// Runs the whole grid. Returns the fault, 0 for none; the report says more.
extern "C" MSLEMU_EXPORT emu::u32 mslemu_launch(emu::Launch* launch) {
  using namespace emu;
  u32 count = threadgroups(launch);
  u64 bytes = launch->workers * sizeof(Share);
  Crew crew{launch,
            {static_cast<u32*>(malloc(count * sizeof(u32))), count, 0},
            static_cast<Share*>(malloc(bytes)),
            1,
            1};
  if (crew.shares) memset(crew.shares, 0, bytes);
  bool ready = !launch->trace || trace_open(launch->trace);
  if (!ready || !run(crew)) launch->report.fault = Fault::kResources;
  if (launch->interrupted && launch->report.fault == Fault::kNone)
    launch->report.fault = Fault::kInterrupted;
  if (launch->trace) trace_close(launch->trace);
  for (u32 number = 0; crew.shares && number < launch->workers; ++number)
    free(crew.shares[number].residents);
  free(crew.order.numbers);
  free(crew.shares);
  return u32(launch->report.fault);
}
