// Spreads the threadgroups of a launch over host threads, in shuffled order.
#include "system.h"
#include "trace.h"

namespace emu {

namespace {

// Most launches of a test are done before another thread would have started.
constexpr long kPatienceNanoseconds = 100000;

struct Order {
  u32* numbers;
  u32 count;
  u32 next;  // atomic
};

struct Share {
  Worker* worker;
  Order* order;
  unsigned long thread;
};

// The host threads of a launch. The first share is the caller's own.
struct Crew {
  Launch* launch;
  Order order;
  Share* shares;
  u32 started;
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

// float32 denormals are zero on the GPU; half keeps its own.
u64 flush_denormals() {
#if defined(__x86_64__)
  u32 before;
  asm volatile("stmxcsr %0" : "=m"(before));
  u32 flushing = before | 0x8040;
  asm volatile("ldmxcsr %0" ::"m"(flushing));
  return before;
#else
  u64 before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" ::"r"(before | 1ull << 24));
  return before;
#endif
}

void restore_denormals(u64 before) {
#if defined(__x86_64__)
  u32 value = u32(before);
  asm volatile("ldmxcsr %0" ::"m"(value));
#else
  asm volatile("msr fpcr, %0" ::"r"(before));
#endif
}

// Takes one threadgroup after the other, until none is left or one has failed.
bool work_on(Share* share) {
  Order* order = share->order;
  if (__atomic_load_n(&share->worker->launch->stop, __ATOMIC_ACQUIRE)) return false;
  u32 at = __atomic_fetch_add(&order->next, 1, __ATOMIC_RELAXED);
  if (at >= order->count) return false;
  run_threadgroup(share->worker, order->numbers[at]);
  return true;
}

u64 enter(Worker* worker) {
  signal_stack_begin(worker);
  threadgroup_memory_begin(worker);
  return flush_denormals();
}

void leave(Worker* worker, u64 denormals) {
  restore_denormals(denormals);
  signal_stack_end(worker);
}

void* help(void* argument) {
  auto* share = static_cast<Share*>(argument);
  u64 denormals = enter(share->worker);
  while (work_on(share)) {
  }
  leave(share->worker, denormals);
  return nullptr;
}

bool hire(Crew& crew, u32 number) {
  Worker* worker = worker_open(number);
  if (!worker) return false;
  worker->launch = crew.launch;
  worker->tracer = nullptr;
  if (crew.launch->trace && !tracer_open(worker)) return false;
  crew.shares[number] = {worker, &crew.order, 0};
  return true;
}

// Starts as many threads as there is work for; fewer if the system refuses.
void call_for_help(Crew& crew) {
  u32 done = __atomic_load_n(&crew.order.next, __ATOMIC_RELAXED);
  u32 left = crew.order.count - done;
  u32 wanted = left < crew.launch->workers ? left : crew.launch->workers - 1;
  while (crew.started <= wanted && hire(crew, crew.started) &&
         pthread_create(&crew.shares[crew.started].thread, nullptr, help,
                        &crew.shares[crew.started]) == 0)
    ++crew.started;
}

long nanoseconds() {
  TimeSpec now;
  clock_gettime(kClockMonotonic, &now);
  return now.seconds * 1000000000 + now.nanoseconds;
}

void lead(Crew& crew) {
  Share* mine = &crew.shares[0];
  u64 denormals = enter(mine->worker);
  long begin = nanoseconds();
  bool alone = crew.launch->workers > 1;
  while (work_on(mine)) {
    if (!alone || nanoseconds() - begin < kPatienceNanoseconds) continue;
    alone = false;
    if (crew.order.next < crew.order.count) call_for_help(crew);
  }
  leave(mine->worker, denormals);
  for (u32 number = 1; number < crew.started; ++number)
    pthread_join(crew.shares[number].thread, nullptr);
}

u32 threadgroups(const Launch* launch) {
  const Coordinates& grid = launch->grid;
  const Coordinates& size = launch->threadgroup;
  return (grid.x + size.x - 1) / size.x * ((grid.y + size.y - 1) / size.y) *
         ((grid.z + size.z - 1) / size.z);
}

// False if the system refuses memory or signal handlers.
bool run(Crew& crew) {
  if (!crew.order.numbers || !crew.shares || !hire(crew, 0)) return false;
  shuffle(crew.order, crew.launch->seed);
  if (!signals_begin()) return false;
  lead(crew);
  signals_end();
  for (u32 number = 0; crew.launch->trace && number < crew.started; ++number) {
    trace_collect(crew.launch->trace, crew.shares[number].worker);
    tracer_close(crew.shares[number].worker);
  }
  return true;
}

}  // namespace

}  // namespace emu

// Runs the whole grid. Returns the fault, 0 for none; the report says more.
extern "C" MSLEMU_EXPORT emu::u32 mslemu_launch(emu::Launch* launch) {
  using namespace emu;
  u32 count = threadgroups(launch);
  Crew crew{launch,
            {static_cast<u32*>(malloc(count * sizeof(u32))), count, 0},
            static_cast<Share*>(malloc(launch->workers * sizeof(Share))),
            1};
  bool ready = !launch->trace || trace_open(launch->trace);
  if (!ready || !run(crew)) launch->report.fault = Fault::kResources;
  if (launch->trace) trace_close(launch->trace);
  free(crew.order.numbers);
  free(crew.shares);
  return u32(launch->report.fault);
}
