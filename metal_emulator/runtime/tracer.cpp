// The life of trace mode: its memory, and what happens when threads meet.
#include "system.h"
#include "trace.h"

namespace emu {

namespace {

constexpr u32 kMaxCounters = 1 << 18;

// Zeroed memory that costs nothing until it is touched.
u8* fresh(u64 bytes) {
  void* address = mmap(nullptr, bytes, kProtReadWrite,
                       kMapPrivate | kMapAnonymous | kMapReserve, -1, 0);
  return address == kMapFailed ? nullptr : static_cast<u8*>(address);
}

// What a tracer needs, one behind the other in one block.
struct Layout {
  u64 logs, cells, first_counter, occurrences, counters, gathering, end;

  explicit Layout(const Trace* trace) {
    u64 at = (sizeof(Tracer) + 63) / 64 * 64;
    auto take = [&](u64 bytes) {
      u64 here = at;
      at += (bytes + 63) / 64 * 64;
      return here;
    };
    logs = take(kMaxThreads * kLogLength * sizeof(Entry));
    cells = take(kThreadgroupSlots * kThreadgroupLimit * sizeof(Cell));
    first_counter = take(trace->library_bytes * sizeof(u32));
    occurrences = take(trace->library_bytes * sizeof(u32));
    counters = take(kMaxCounters * sizeof(Counter));
    gathering = take(gathering_bytes());
    end = at;
  }
};

}  // namespace

bool tracer_open(Worker* worker) {
  Trace* trace = worker->launch->trace;
  Layout layout(trace);
  u8* block = fresh(layout.end);
  if (!block) return false;
  auto* tracer = reinterpret_cast<Tracer*>(block);
  tracer->trace = trace;
  tracer->block_bytes = layout.end;
  tracer->logs = reinterpret_cast<Entry*>(block + layout.logs);
  tracer->threadgroup_cells = reinterpret_cast<Cell*>(block + layout.cells);
  tracer->first_counter = reinterpret_cast<u32*>(block + layout.first_counter);
  tracer->occurrences = reinterpret_cast<u32*>(block + layout.occurrences);
  tracer->counters = reinterpret_cast<Counter*>(block + layout.counters);
  tracer->gathering = reinterpret_cast<Gathering*>(block + layout.gathering);
  worker->tracer = tracer;
  return true;
}

void tracer_close(Worker* worker) {
  if (!worker->tracer) return;
  order_begin(worker);
  munmap(worker->tracer, worker->tracer->block_bytes);
  worker->tracer = nullptr;
}

void tracer_begin(Worker* worker, u32 number) {
  Tracer* tracer = worker->tracer;
  tracer->group = number;
  tracer->doubt.count = 0;
  order_begin(worker);
  for (u64& length : tracer->lengths) length = 0;
  for (u32 group = 0; group < kMaxSimdgroups; ++group)
    worker->view.simdgroups[group].full = 0;
}

void tracer_met(Worker* worker, u32 simdgroup, const Operation* operation,
                const void* site) {
  Tracer* tracer = worker->tracer;
  if (tracer->doubt.count) settle(worker);
  count_accesses(worker, simdgroup);
  if (!operation) return;
  u32 offset = u32(static_cast<const u8*>(site) - tracer->trace->library);
  u32 memory = kFirstOperation + u32(operation->kind);
  counter_of(worker, offset, memory, operation->name).values[kOperations] += 1;
  if (operation->kind != Operations::kBarrier) return;
  for (u32 memory = 0; memory < 2; ++memory) {
    if (!orders(tracer->flags[simdgroup], memory)) continue;
    order_simdgroup(worker, simdgroup, memory);
    tracer->steps[simdgroup][memory] += 1;
  }
}

void tracer_barrier(Worker* worker, u32 flags, const void* site) {
  Tracer* tracer = worker->tracer;
  u32 offset = u32(static_cast<const u8*>(site) - tracer->trace->library);
  Counter& counter =
      counter_of(worker, offset, kThreadgroupBarrier, "threadgroup_barrier");
  counter.values[kOperations] += 1;
  for (u32 memory = 0; memory < 2; ++memory) {
    if (!orders(flags, memory)) continue;
    order_threadgroup(worker, memory);
    tracer->epochs[memory] += 1;
  }
}

bool trace_open(Trace* trace) {
  trace->locks = fresh(kLocks);
  trace->locations = reinterpret_cast<Location*>(fresh(locations_bytes()));
  bool fine = trace->locks && trace->locations;
  for (u64 number = 0; number < trace->memory_count; ++number) {
    Memory& memory = trace->memories[number];
    if (!memory.writable || !memory.bytes) continue;
    memory.cells = reinterpret_cast<Cell*>(fresh(memory.bytes * sizeof(Cell)));
    fine = fine && memory.cells;
  }
  return fine;
}

// Counts what no thread has written.
void find_unwritten(Memory& memory) {
  for (u64 at = memory.bytes; at-- > 0;) {
    if (memory.cells[at].write.site || memory.cells[at].atomic.site) continue;
    memory.unwritten += 1;
    memory.first_unwritten = at;
  }
}

void trace_close(Trace* trace) {
  order_close(trace);
  if (trace->locations) munmap(trace->locations, locations_bytes());
  if (trace->locks) munmap(trace->locks, kLocks);
  for (u64 number = 0; number < trace->memory_count; ++number) {
    Memory& memory = trace->memories[number];
    if (!memory.cells) continue;
    if (!memory.written) find_unwritten(memory);
    munmap(memory.cells, memory.bytes * sizeof(Cell));
  }
}

void trace_collect(Trace* trace, Worker* worker) {
  for (u32 number = 0; number < worker->tracer->counter_count; ++number)
    if (trace->counter_count < trace->counter_capacity)
      trace->counters[trace->counter_count++] = worker->tracer->counters[number];
  if (worker->threadgroup_bytes > trace->threadgroup_bytes)
    trace->threadgroup_bytes = worker->threadgroup_bytes;
}

}  // namespace emu
