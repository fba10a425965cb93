// A fault inside a kernel becomes a report: the handler notes what happened and sends
// the thread back to its scheduler. A fault anywhere else goes to whoever handled it
// before. So it is when a launch is to end, because it takes too long or a handler of
// Python's has raised; for such handlers a thread pauses in its kernel.
#include "runtime.h"
#include "system.h"

extern "C" {
int sigaction(int number, const void* action, void* before);
int sigaltstack(const void* stack, void* before);
int sigemptyset(void* set);
int sigfillset(void* set);
int sigaddset(void* set, int number);
int pthread_sigmask(int how, const void* set, void* before);
}

namespace emu {

namespace {

#if defined(__APPLE__)
constexpr int kBus = 10, kUrgent = 16;
constexpr int kSigInfo = 0x40, kOnStack = 0x01;
constexpr int kDisable = 4, kUnblock = 2, kSetMask = 3;
struct Action {
  void (*handler)(int, u8*, u8*);
  u32 mask;
  int flags;
};
struct SignalStack {
  void* begin;
  u64 bytes;
  int flags;
};
constexpr u32 kAddressOffset = 24;  // siginfo_t.si_addr
u8* machine(u8* context) { return *reinterpret_cast<u8**>(context + 48); }
#else
constexpr int kBus = 7, kUrgent = 23;
constexpr int kSigInfo = 0x4, kOnStack = 0x08000000;
constexpr int kDisable = 2, kUnblock = 1, kSetMask = 2;
struct Action {
  void (*handler)(int, u8*, u8*);
  u64 mask[16];
  int flags;
  void (*restorer)();
};
struct SignalStack {
  void* begin;
  int flags;
  u64 bytes;
};
constexpr u32 kAddressOffset = 16;
u8* machine(u8* context) { return context; }
#endif
constexpr int kIll = 4, kTrap = 5, kFpe = 8, kSegv = 11;
// The last one is sent by guard.cpp; nobody minds it where it is not expected.
constexpr int kCaught[] = {kSegv, kBus, kIll, kTrap, kFpe, kUrgent};
constexpr u64 kSignalStackBytes = 64 << 10;

// Offsets of the saved registers in the machine context of each system.
#if defined(__APPLE__) && defined(__aarch64__)
constexpr u32 kPc = 16 + 256, kSp = 16 + 248, kFrame = 16 + 232;
#elif defined(__APPLE__)
constexpr u32 kPc = 16 + 16 * 8, kSp = 16 + 7 * 8, kFrame = 16 + 6 * 8;
constexpr u32 kDividend = 16;  // rax
#elif defined(__aarch64__)
constexpr u32 kRegisters = 184;
constexpr u32 kPc = kRegisters + 32 * 8, kSp = kRegisters + 31 * 8;
constexpr u32 kFrame = kRegisters + 29 * 8;
#else
constexpr u32 kGeneral = 40;  // gregs
constexpr u32 kPc = kGeneral + 16 * 8, kSp = kGeneral + 15 * 8;
constexpr u32 kFrame = kGeneral + 10 * 8, kError = kGeneral + 19 * 8;
constexpr u32 kDividend = kGeneral + 13 * 8;  // rax
#endif

u64& saved(u8* context, u32 offset) {
  return *reinterpret_cast<u64*>(machine(context) + offset);
}

bool was_write(u8* context) {
#if defined(__APPLE__) && defined(__aarch64__)
  return *reinterpret_cast<u32*>(machine(context) + 8) >> 6 & 1;  // ESR.WnR
#elif defined(__APPLE__)
  return *reinterpret_cast<u32*>(machine(context) + 4) >> 1 & 1;
#elif defined(__aarch64__)
  // The syndrome register is a record of its own behind the general registers.
  u8* record = machine(context) + kRegisters + 34 * 8 + 8;
  while (*reinterpret_cast<u32*>(record) != 0) {
    if (*reinterpret_cast<u32*>(record) == 0x45535201)
      return *reinterpret_cast<u64*>(record + 8) >> 6 & 1;
    record += *reinterpret_cast<u32*>(record + 4);
  }
  return false;
#else
  return saved(context, kError) >> 1 & 1;
#endif
}

// Addresses on the way to the fault: the place itself, and what look like its callers,
// in case a library function faulted for the kernel. The reader keeps those in the
// kernel.
void trace(Report& report, Worker* worker, u8* context) {
  auto note = [&](u64 address) {
    if (report.trace_length < kMaxTrace)
      report.trace[report.trace_length++] = reinterpret_cast<const void*>(address);
  };
  u64 sp = saved(context, kSp), frame = saved(context, kFrame);
  note(saved(context, kPc));
  if (report.fault == Fault::kStackOverflow) return;
  u64 low = u64(worker->region), high = u64(&worker->view);
  if (sp % 8 == 0 && sp + 8 <= high) note(*reinterpret_cast<u64*>(sp));
  while (frame >= low && frame + 16 <= high && frame % 8 == 0) {
    auto* words = reinterpret_cast<u64*>(frame);
    note(words[1]);
    if (words[0] <= frame) break;
    frame = words[0];
  }
}

Fault kind(int number, const Worker* worker, u64 address, u64 sp) {
  if (number == kFpe) return Fault::kArithmetic;
  if (number == kIll || number == kTrap) return Fault::kInstruction;
  u64 offset = address - u64(worker->region);
  bool own = offset < kMaxThreads * kStackBytes;
  if (own && (sp - u64(worker->region)) / kStackBytes == offset / kStackBytes)
    return Fault::kStackOverflow;
  return Fault::kAccess;
}

u64 blocked_in_kernel[16];  // sigset_t of the thread that launches
Action before[sizeof kCaught / sizeof *kCaught];

void give_back(int number) {
  for (u32 at = 0; at < sizeof kCaught / sizeof *kCaught; ++at)
    if (kCaught[at] == number) sigaction(number, &before[at], nullptr);
}

void leave_fiber(Worker* worker, Report& report, u8* context) {
  trace(report, worker, context);
  worker->fault = report;
  saved(context, kSp) = u64(worker->scheduler);
  saved(context, kPc) = u64(&mslemu_restore);
}

void handle(int number, u8* info, u8* context) {
  u64 sp = saved(context, kSp);
  Worker* worker = worker_at(sp);
  if (!worker) {
    give_back(number);
    return;
  }
  u64 address = *reinterpret_cast<u64*>(info + kAddressOffset);
  Report report = report_of(worker, kind(number, worker, address, sp),
                            u32((sp - u64(worker->region)) / kStackBytes));
  report.address = address;
  report.is_write = was_write(context);
  report.amount = *reinterpret_cast<u32*>(info + 8);
#if defined(__x86_64__)
  if (number == kFpe) report.amount = saved(context, kDividend);
#endif
  const ThreadgroupArray* array = threadgroup_array_at(worker, address);
  if (report.fault == Fault::kAccess && array) {
    report.fault = Fault::kThreadgroupAccess;
    report.text = array->name;
    report.amount = array->bytes;
    report.address = address - u64(array->begin);
  }
  leave_fiber(worker, report, context);
}

// Only the kernel's own code can be left anywhere: it holds no lock.
void handle_urgent(int, u8*, u8* context) {
  u64 sp = saved(context, kSp);
  Worker* worker = worker_at(sp);
  if (!worker) return;
  const Launch* launch = worker->launch;
  if (saved(context, kPc) - u64(launch->library) >= launch->library_bytes) return;
  if (worker->attends) mslemu_switch(&worker->preempted, worker->scheduler);
  bool late = nanoseconds() - worker->began > launch->time_limit;
  if (!launch->interrupted && !late) return;
  Fault fault = launch->interrupted ? Fault::kInterrupted : Fault::kTimeLimit;
  Report report =
      report_of(worker, fault, u32((sp - u64(worker->region)) / kStackBytes));
  leave_fiber(worker, report, context);
}

}  // namespace

bool signals_begin() {
  Action action{};
  action.flags = kSigInfo | kOnStack;
  for (u32 at = 0; at < sizeof kCaught / sizeof *kCaught; ++at) {
    bool urgent = kCaught[at] == kUrgent;
    action.handler = urgent ? handle_urgent : handle;
    // Where it waits, another handler would overwrite its frame.
    urgent ? sigfillset(&action.mask) : sigemptyset(&action.mask);
    if (sigaction(kCaught[at], &action, &before[at])) return false;
  }
  return true;
}

void signals_end() {
  for (int number : kCaught) give_back(number);
}

void urge(Worker* worker) { pthread_kill(worker->host, kUrgent); }

bool signals_enter(Worker* worker) {
  SignalStack stack{};
  stack.begin = worker->signal_stack;
  stack.bytes = kSignalStackBytes;
  u64 caught[16];  // sigset_t
  sigemptyset(caught);
  for (int number : kCaught) sigaddset(caught, number);
  // A fault whose signal is blocked ends the process.
  bool entered = sigaltstack(&stack, worker->signal_stack_before) == 0 &&
                 pthread_sigmask(kUnblock, caught, worker->blocked_before) == 0;
  if (worker->attends) pthread_sigmask(kUnblock, nullptr, blocked_in_kernel);
  return entered;
}

void signals_leave(Worker* worker) {
  pthread_sigmask(kSetMask, worker->blocked_before, nullptr);
  sigaltstack(worker->signal_stack_before, nullptr);
}

void attend_preempted(Launch* launch) {
  SignalStack none{}, mine;
  none.flags = kDisable;
  u64 blocked[16];
  sigaltstack(&none, &mine);
  pthread_sigmask(kSetMask, blocked_in_kernel, blocked);
  attend(launch);
  pthread_sigmask(kSetMask, blocked, nullptr);
  sigaltstack(&mine, nullptr);
}

}  // namespace emu
