// Spreads the threadgroups of a launch over host threads, in shuffled order.
#include "runtime.h"
#include "system.h"

namespace emu {

namespace {

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

void* work(void* argument) {
  auto* share = static_cast<Share*>(argument);
  Worker* worker = share->worker;
  Order* order = share->order;
  u64 before = flush_denormals();
  signal_stack_begin(worker);
  threadgroup_memory_begin(worker);
  while (!__atomic_load_n(&worker->launch->stop, __ATOMIC_ACQUIRE)) {
    u32 at = __atomic_fetch_add(&order->next, 1, __ATOMIC_RELAXED);
    if (at >= order->count) break;
    run_threadgroup(worker, order->numbers[at]);
  }
  signal_stack_end(worker);
  restore_denormals(before);
  return nullptr;
}

u32 threadgroups(const Launch* launch) {
  const Coordinates& grid = launch->grid;
  const Coordinates& size = launch->threadgroup;
  return (grid.x + size.x - 1) / size.x * ((grid.y + size.y - 1) / size.y) *
         ((grid.z + size.z - 1) / size.z);
}

// Opens the workers and runs them; false if the system refuses memory.
bool run(Launch* launch, Order& order, Share* shares, u32 workers) {
  for (u32 number = 0; number < workers; ++number) {
    Worker* worker = worker_open(number);
    if (!worker) return false;
    worker->launch = launch;
    shares[number] = {worker, &order, 0};
  }
  if (!signals_begin()) return false;
  u32 started = 1;
  while (started < workers &&
         pthread_create(&shares[started].thread, nullptr, work, &shares[started]) == 0)
    ++started;
  work(&shares[0]);
  for (u32 number = 1; number < started; ++number)
    pthread_join(shares[number].thread, nullptr);
  signals_end();
  return true;
}

}  // namespace

}  // namespace emu

// Runs the whole grid. Returns the fault, 0 for none; the report says more.
extern "C" emu::u32 mslemu_launch(emu::Launch* launch) {
  using namespace emu;
  Order order{nullptr, threadgroups(launch), 0};
  u32 workers = launch->workers < order.count ? launch->workers : order.count;
  order.numbers = static_cast<u32*>(malloc(order.count * sizeof(u32)));
  auto* shares = static_cast<Share*>(malloc(workers * sizeof(Share)));
  bool done = order.numbers && shares;
  if (done) {
    shuffle(order, launch->seed);
    done = run(launch, order, shares, workers);
  }
  free(order.numbers);
  free(shares);
  if (!done) launch->report.fault = Fault::kResources;
  return u32(launch->report.fault);
}
