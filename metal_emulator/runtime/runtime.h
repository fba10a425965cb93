// State of the run time. No system header is included: the few functions of the C
// library that are needed are declared here, and found in the process at load time.
#pragma once
#include "../include/abi.h"

namespace emu {

constexpr u32 kThreadgroupSlots = 64;
constexpr u64 kThreadgroupLimit = 32 << 10;
constexpr u64 kThreadgroupStride = 128 << 10;  // one slot with its guards
constexpr u32 kMaxTrace = 24;
constexpr u32 kPolls = 8;  // atomics that a waiting loop may read, one after the other
constexpr u8 kPoison = 0xFF;  // NaN in every floating type

// Values shared with report.py.
enum class Fault : u32 {
  kNone = 0,
  kAccess = 1,  // address not mapped, or not writable
  kStackOverflow = 2,
  kInstruction = 3,  // trap
  kArithmetic = 4,   // integer division: amount is the dividend
  kDeadlock = 5,     // nothing can run, somebody waits
  kMismatch = 6,     // lanes of a simdgroup in different operations
  kThreadgroupLimit = 7,
  kMisuse = 8,
  kThreadgroupCanary = 9,
  kResources = 10,
  kThreadgroupAccess = 11,  // address is the offset into the array
  kRace = 12,               // as kAccess, or as kThreadgroupAccess if there is a text
  kPoison = 13,             // likewise
  kBarrierSites = 14,
  kLivelock = 15,     // threads wait for what nobody who runs can change
  kTimeLimit = 16,    // a threadgroup has run for too long
  kInterrupted = 17,  // by Ctrl-C
  kNoLane = 18,       // a value of a lane that no simdgroup or quad has
};

enum class Activity : u32 { kReady = 0, kReturned = 1, kBarrier = 2, kSimd = 3 };

// Layout shared with engine.py (ctypes).
struct Report {
  Fault fault;
  u32 thread;
  Coordinates threadgroup;
  Coordinates size;
  u32 is_write;
  u32 trace_length;
  u64 address;
  const char* text;  // name of an operation, an array or a complaint
  u64 amount;        // bytes; for kAccess the system's code (si_code)
  const void*
      trace[kMaxTrace];  // where it happened, innermost first; may hold strangers
  // Of a race or of calls that do not meet: where it happened, and the earlier access or
  // the other call.
  const void* site;
  const void* other_site;
  u32 other_thread;
  u32 other_is_write;
  Coordinates other_threadgroup;
};

struct ThreadState {
  Activity activity;
  u32 reserved;
  const void* site;
  const char* operation;
};

using Body = void (*)();

// A return address, and the one that stands for its place in the source. The compiler may
// copy a call or a store into two branches.
struct Copy {
  const void* site;
  const void* place;
};

struct Trace;
struct Tracer;

// Python's functions of these names: PyGILState_Ensure, PyGILState_Release,
// PyErr_CheckSignals, PyErr_Fetch. Layout shared with native.py (ctypes).
struct Python {
  int (*ensure)();
  void (*release)(int state);
  int (*check_signals)();
  void (*fetch)(void** type, void** value, void** traceback);
};

// Layout shared with engine.py (ctypes).
struct Launch {
  Body entry;
  void* const* buffers;
  Coordinates grid;
  Coordinates threadgroup;
  u64 seed;
  u32 workers;
  u32 stop;
  ThreadState* states;  // kMaxThreads, filled on a deadlock
  Trace* trace;         // null in plain mode
  const u8* library;    // where the kernel's library is loaded
  u64 library_bytes;
  u64 time_limit;  // nanoseconds for a threadgroup
  u32 resident;    // threadgroups of a host thread that take turns
  u32 interrupted;
  Report report;
  const Python* python;  // null unless its main thread launches
  void* raised[3];       // what a handler of a signal has raised
  u64 float_mode;        // of the thread that launches
  u32 due;               // atomic: it is time to attend to signals
  const Copy* copies;    // what is known of the kernel
  u64 copy_count;
};

struct ThreadgroupArray {
  u8* begin;
  u64 bytes;
  u64 mapped;  // bytes that may be touched, up to the guard
  u64 run;     // number of the threadgroup that saw it last
  const char* name;
};

struct Waiting {
  const void* site;
  const Operation* operation;
};

// `view` first: kernels see a worker as a WorkerView.
struct Worker {
  WorkerView view;
  Launch* launch;
  Tracer* tracer;             // null in plain mode
  void* scheduler;            // saved stack pointer of whoever runs the fibers
  void* stacks[kMaxThreads];  // saved stack pointers of the fibers
  Waiting waits[kMaxThreads];
  u32 stopped;               // threads at the barrier
  const void* barrier_site;  // of the first of them, in trace mode
  u32 first;                 // simdgroup to look at first, shuffled
  u64 run;                   // counts threadgroups over the life of the worker
  u8* region;
  u8* threadgroup_memory;  // kThreadgroupSlots * kThreadgroupStride
  u8* signal_stack;
  u64 signal_stack_before[4];  // stack_t of the host thread
  u64 blocked_before[16];      // its sigset_t
  u64 threadgroup_bytes;       // of this launch
  ThreadgroupArray arrays[kThreadgroupSlots];
  Report fault;
  void* preempted;  // saved stack pointer of a handler that waits for `attend`
  bool attends;     // its host thread is the one that launches
  u64 host;        // pthread_t of the host thread that runs it
  u64 began;       // nanoseconds; 0 while it has no threadgroup
  bool moved;      // since it was resumed, a thread did more than poll
  bool condemned;  // the next thread that polls reports a livelock
  u32 streaks[kMaxThreads];  // polls in a row that read nothing new
  struct {
    const void* site;
    const volatile void* address;
    u64 value;
  } polls[kMaxThreads][kPolls];
};

inline Worker* worker_of(Self self) { return reinterpret_cast<Worker*>(self.worker); }

// Lets another thread run; returns when this one is chosen again.
void give_way(Worker* worker, u32 index);
// Notes a fault and leaves the threadgroup for good.
[[noreturn]] void abandon(Worker* worker, const Report& report);
Report report_of(Worker* worker, Fault fault, u32 thread);
void begin_threadgroup(Worker* worker, u32 number);
// Runs the threadgroup until it has ended or failed, or until all threads that could run
// poll an atomic: false then, and it can be resumed.
bool resume_threadgroup(Worker* worker);

Worker* worker_open(u32 number);
void threadgroup_memory_begin(Worker* worker);
bool threadgroup_memory_intact(Worker* worker, const char** name);
// The array that an address in or around threadgroup memory belongs to, or null.
const ThreadgroupArray* threadgroup_array_at(const Worker* worker, u64 address);
[[noreturn]] void misuse(Self self, const char* what, const void* site);
// Whether two return addresses are one place in the source, as far as it is known.
bool same_place(const Worker* worker, const void* a, const void* b);
// Notes the return addresses on the way here, the one at `site` first.
void trace_calls(Report& report, Worker* worker, const void* site);
Worker* worker_at(u64 stack);  // whose fiber stacks contain this address
Worker* worker_number(u32 number);  // null behind the last

// Lets Python run its handlers; what they raise ends the launch.
void attend(Launch* launch);
// Likewise, while a handler on the signal stack waits.
void attend_preempted(Launch* launch);
bool signals_begin();
void signals_end();
// Ends launches that were interrupted or take too long.
void guard_begin(Launch* launch);
void guard_end();
// Its host thread may end after that.
void guard_forget(Worker* worker);
// Asks the host thread of a worker to end its threadgroup.
void urge(Worker* worker);
u64 nanoseconds();
// A host thread takes part in launches: its faults reach the handlers. False if the
// system refuses.
bool signals_enter(Worker* worker);
void signals_leave(Worker* worker);

}  // namespace emu

extern "C" {
void* memcpy(void* to, const void* from, unsigned long bytes);
void* memset(void* to, int value, unsigned long bytes);
void mslemu_switch(void** save, void* load);
void mslemu_restore();
}
