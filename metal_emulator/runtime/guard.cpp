// A thread that looks after launches: what was interrupted, and what takes too long, is
// told to end, and Python's main thread to attend to signals. It sleeps most of the time and lives as long as the process.
#include "runtime.h"
#include "system.h"

namespace emu {

namespace {

constexpr long kTick = 20000000;  // nanoseconds

u8 busy;  // held while `guarded` is read or changed
Launch* guarded;
bool started;

void lock() {
  while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) sched_yield();
}

void unlock() { __atomic_clear(&busy, __ATOMIC_RELEASE); }

// Again at every tick: a thread that is not in the kernel's own code then ignores it.
void look(Launch* launch) {
  __atomic_store_n(&launch->due, 1, __ATOMIC_RELAXED);
  u64 now = nanoseconds();
  bool interrupted = __atomic_load_n(&launch->interrupted, __ATOMIC_RELAXED);
  for (u32 number = 0; Worker* worker = worker_number(number); ++number) {
    u64 began = __atomic_load_n(&worker->began, __ATOMIC_RELAXED);
    if (!began || worker->launch != launch) continue;
    bool late = now > began && now - began > launch->time_limit;
    if (interrupted || late || worker->attends) urge(worker);
  }
}

void* watch(void*) {
  for (;;) {
    TimeSpec tick{0, kTick};
    nanosleep(&tick, nullptr);
    lock();
    if (guarded) look(guarded);
    unlock();
  }
}

}  // namespace

u64 nanoseconds() {
  TimeSpec now;
  clock_gettime(kClockMonotonic, &now);
  return u64(now.seconds) * 1000000000 + u64(now.nanoseconds);
}

void guard_begin(Launch* launch) {
  lock();
  guarded = launch;
  unlock();
  if (started) return;
  unsigned long thread;
  started = pthread_create(&thread, nullptr, watch, nullptr) == 0;
  if (started) pthread_detach(thread);
}

void guard_end() {
  lock();
  guarded = nullptr;
  unlock();
}

void guard_forget(Worker* worker) {
  lock();
  worker->began = 0;
  unlock();
}

}  // namespace emu
