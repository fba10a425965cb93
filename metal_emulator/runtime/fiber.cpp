// One fiber per Metal thread: the switch, and the life of a threadgroup.
#include "trace.h"

#if defined(__APPLE__)
#define SYMBOL(name) "_" #name
#else
#define SYMBOL(name) #name
#endif

// mslemu_switch(void** save, void* load): keeps the callee-saved registers on the stack
// and continues on another one, or starts a fiber there if bit 0 of `load` is set.
// mslemu_restore is its second half; a signal handler goes there to leave a fiber. Both
// stacks wait in the same functions, so the processor predicts every return on the way
// out.
#if defined(__x86_64__)
asm(".text\n"
    ".p2align 4\n"
    ".globl " SYMBOL(mslemu_switch) "\n" SYMBOL(mslemu_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n"
    "  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  testb $1, %sil\n"
    "  jnz 1f\n"
    "  movq %rsi, %rsp\n"
    ".globl " SYMBOL(mslemu_restore) "\n" SYMBOL(mslemu_restore) ":\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n"
    "  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  retq\n"
    "1:\n"
    "  leaq -1(%rsi), %rsp\n"
    "  xorl %ebp, %ebp\n"
    "  callq " SYMBOL(mslemu_fiber) "\n"
    "  ud2\n");
#elif defined(__aarch64__)
asm(".text\n"
    ".p2align 4\n"
    ".globl " SYMBOL(mslemu_switch) "\n" SYMBOL(mslemu_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  tbnz x1, #0, 1f\n"
    "  mov sp, x1\n"
    ".globl " SYMBOL(mslemu_restore) "\n" SYMBOL(mslemu_restore) ":\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    "1:\n"
    "  sub x1, x1, #1\n"
    "  mov sp, x1\n"
    "  mov x29, #0\n"
    "  bl " SYMBOL(mslemu_fiber) "\n"
    "  brk #1\n");
#endif

namespace emu {

namespace {

// Stack tops differ by a few cache lines, so that the fibers' frames do not all fall
// into the same sets of the caches.
constexpr u64 kColours = 61;
constexpr u64 kColourBytes = 128;

// Where a fiber starts, marked as fresh for mslemu_switch.
void* fresh_stack(Worker* worker, u32 index) {
  u8* end = worker->region + (index + 1) * kStackBytes;
  return end - 64 - (index % kColours) * kColourBytes + 1;
}

u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

u32 simdgroups(const Worker* worker) {
  return (worker->view.threadgroup.threads + kLanes - 1) / kLanes;
}

// Trace mode: a simdgroup in which nobody can run, because logs are full, is put
// together and goes on. Returns its lanes, 0 if there is none such.
__attribute__((noinline)) u32 release_full(Worker* worker, u32& group, u32 count) {
  Simdgroup* groups = worker->view.simdgroups;
  for (u32 number = 0; number < count; ++number) {
    if (!groups[number].full) continue;
    tracer_met(worker, number, nullptr, nullptr);
    group = number;
    u32 ready = groups[number].full;
    groups[number].full = 0;
    return ready;
  }
  return 0;
}

// The thread to run next, own simdgroup first; kMaxThreads if none can.
inline u32 next_thread(Worker* worker, u32 group) {
  Simdgroup* groups = worker->view.simdgroups;
  u32 ready = groups[group].ready;
  if (!ready) {
    u32 count = simdgroups(worker);
    for (u32 tried = 0; tried < count && !ready; ++tried) {
      group = worker->first + tried < count ? worker->first + tried
                                            : worker->first + tried - count;
      ready = groups[group].ready;
    }
    if (!ready && worker->tracer) ready = release_full(worker, group, count);
    if (!ready) return kMaxThreads;
  }
  u32 lane = u32(__builtin_ctz(ready));
  groups[group].ready = ready & (ready - 1);
  return group * kLanes + lane;
}

inline void* stack_of(const Worker* worker, u32 thread) {
  return thread == kMaxThreads ? worker->scheduler : worker->stacks[thread];
}

inline void* next_stack(Worker* worker, u32 group) {
  return stack_of(worker, next_thread(worker, group));
}

void place(Worker* worker, u32 number) {
  const Launch* launch = worker->launch;
  Threadgroup& here = worker->view.threadgroup;
  here.grid = launch->grid;
  here.nominal = launch->threadgroup;
  here.buffers = launch->buffers;
  here.count = {(here.grid.x + here.nominal.x - 1) / here.nominal.x,
                (here.grid.y + here.nominal.y - 1) / here.nominal.y,
                (here.grid.z + here.nominal.z - 1) / here.nominal.z};
  here.position = {number % here.count.x, number / here.count.x % here.count.y,
                   number / here.count.x / here.count.y};
  here.size = {smaller(here.nominal.x, here.grid.x - here.position.x * here.nominal.x),
               smaller(here.nominal.y, here.grid.y - here.position.y * here.nominal.y),
               smaller(here.nominal.z, here.grid.z - here.position.z * here.nominal.z)};
  here.threads = here.size.x * here.size.y * here.size.z;
}

void prepare(Worker* worker) {
  u32 threads = worker->view.threadgroup.threads;
  worker->stopped = 0;
  worker->run += 1;
  for (u32 index = 0; index < threads; ++index) {
    worker->stacks[index] = fresh_stack(worker, index);
    worker->streaks[index] = 0;
  }
  for (u32 begin = 0; begin < threads; begin += kLanes) {
    Simdgroup& group = worker->view.simdgroups[begin / kLanes];
    u32 lanes = smaller(kLanes, threads - begin);
    group.exist = u32((u64(1) << lanes) - 1);
    group.ready = group.exist;
    group.waiting = group.stopped = group.returned = group.polling = 0;
    for (u32& parity : group.parity) parity = 0;
  }
}

void describe(Worker* worker) {
  for (u32 index = 0; index < worker->view.threadgroup.threads; ++index) {
    const Simdgroup& group = worker->view.simdgroups[index / kLanes];
    u32 bit = 1u << (index % kLanes);
    ThreadState& state = worker->launch->states[index];
    state = {Activity::kReady, 0, worker->waits[index].site, nullptr};
    if (group.returned & bit) state.activity = Activity::kReturned;
    if (group.stopped & bit) state.activity = Activity::kBarrier;
    if (group.waiting & bit) {
      state.activity = Activity::kSimd;
      state.operation = worker->waits[index].operation->name;
    }
  }
}

bool everybody_returned(const Worker* worker) {
  for (u32 group = 0; group < simdgroups(worker); ++group)
    if (worker->view.simdgroups[group].returned != worker->view.simdgroups[group].exist)
      return false;
  return true;
}

bool somebody_polls(const Worker* worker) {
  for (u32 number = 0; number < simdgroups(worker); ++number)
    if (worker->view.simdgroups[number].polling) return true;
  return false;
}

void publish(Worker* worker) {
  Launch* launch = worker->launch;
  u32 nobody = 0;
  if (!__atomic_compare_exchange_n(&launch->stop, &nobody, 1, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE))
    return;  // another worker has failed first; its report stands
  launch->report = worker->fault;
  Fault fault = worker->fault.fault;
  if (fault == Fault::kDeadlock || fault == Fault::kMismatch) describe(worker);
}

void end_threadgroup(Worker* worker) {
  if (worker->fault.fault == Fault::kNone && !everybody_returned(worker))
    worker->fault = report_of(worker, Fault::kDeadlock, 0);
  const char* name;
  if (worker->fault.fault == Fault::kNone &&
      !threadgroup_memory_intact(worker, &name)) {
    worker->fault = report_of(worker, Fault::kThreadgroupCanary, 0);
    worker->fault.text = name;
  }
  if (worker->fault.fault != Fault::kNone) publish(worker);
}

}  // namespace

void give_way(Worker* worker, u32 index) {
  u32 next = next_thread(worker, index / kLanes);
  if (next == index) return;  // released at once: only its log was full
  mslemu_switch(&worker->stacks[index], stack_of(worker, next));
}

void abandon(Worker* worker, const Report& report) {
  worker->fault = report;
  void* never;
  mslemu_switch(&never, worker->scheduler);
  __builtin_unreachable();
}

Report report_of(Worker* worker, Fault fault, u32 thread) {
  Report report{};
  report.fault = fault;
  report.thread = thread;
  report.threadgroup = worker->view.threadgroup.position;
  report.size = worker->view.threadgroup.size;
  return report;
}

void begin_threadgroup(Worker* worker, u32 number) {
  place(worker, number);
  prepare(worker);
  if (worker->tracer) tracer_begin(worker, number);
  worker->first = u32((worker->launch->seed ^ number) * 0x9E3779B97F4A7C15ull >> 33) %
                  simdgroups(worker);
  worker->fault.fault = Fault::kNone;
  worker->began = nanoseconds();
}

bool resume_threadgroup(Worker* worker) {
  for (u32 number = 0; number < simdgroups(worker); ++number) {
    Simdgroup& group = worker->view.simdgroups[number];
    group.ready |= group.polling;
    group.polling = 0;
  }
  worker->moved = false;
  void* next = next_stack(worker, worker->first);
  do {
    worker->preempted = nullptr;
    mslemu_switch(&worker->scheduler, next);
    next = worker->preempted;
    if (next) attend_preempted(worker->launch);
  } while (next);
  if (worker->fault.fault == Fault::kNone && somebody_polls(worker)) return false;
  worker->began = 0;
  end_threadgroup(worker);
  return true;
}

}  // namespace emu

// First frame of every fiber.
extern "C" [[noreturn]] void mslemu_fiber() {
  emu::Self self = emu::self();
  emu::Worker* worker = emu::worker_of(self);
  worker->launch->entry();
  worker->moved = true;
  self.simdgroup().returned |= 1u << self.lane();
  if (worker->tracer && self.simdgroup().returned == self.simdgroup().exist)
    emu::tracer_met(worker, self.index / emu::kLanes, nullptr, nullptr);
  void* never;
  mslemu_switch(&never, emu::next_stack(worker, self.index / emu::kLanes));
  __builtin_unreachable();
}
