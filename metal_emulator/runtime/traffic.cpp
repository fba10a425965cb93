// How much a simdgroup moves. Lanes run one after the other, so each keeps a log; when
// all have come to a meeting, the n-th execution of an instruction by each of them is
// one access of the simdgroup.
#include "trace.h"

namespace emu {

constexpr u32 kMaxGroups = kLanes * kLogLength;
constexpr u32 kOpen = 8;     // accesses that a later one may still be merged with
constexpr u32 kWidest = 16;  // bytes of a lane in one access
constexpr u32 kBanks = 32;
constexpr u32 kBankBytes = 4;

// Memory for putting logs together.
struct Gathering {
  u32 used;
  Group groups[kMaxGroups];
  u32 found[2 * kMaxGroups];   // hash table: number of a group + 1
  u64 seen[2 * kMaxGroups];    // hash table of whole groups
  u32 occurrence[kMaxGroups];  // of its site, by group
  u32 open_counters[kOpen];
  Group open[kOpen];
  u32 opened;
};

namespace {

u64 mix(u64 hash, u64 value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 29;
}

// The lanes' offsets in ascending order.
struct Sorted {
  u64 offsets[kLanes];
  u32 count = 0;

  explicit Sorted(const Group& group) {
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if (!(group.lanes >> lane & 1)) continue;
      u32 at = count++;
      for (; at && offsets[at - 1] > group.offsets[lane]; --at)
        offsets[at] = offsets[at - 1];
      offsets[at] = group.offsets[lane];
    }
  }
};

// Units of 2^shift bytes that [offset, offset + bytes) of all lanes touch.
u32 distinct(const Sorted& sorted, u32 bytes, u64 residue, u32 shift) {
  u64 next = 0;  // first unit not counted yet
  u32 count = 0;
  for (u32 at = 0; at < sorted.count; ++at) {
    u64 first = (sorted.offsets[at] + residue) >> shift;
    u64 last = (sorted.offsets[at] + residue + bytes - 1) >> shift;
    if (first < next) first = next;
    if (last >= first) count += u32(last - first + 1);
    if (last >= next) next = last + 1;
  }
  return count;
}

// Cycles of a memory that serves every bank once a cycle.
u32 bank_cycles(const Sorted& sorted, u32 bytes) {
  u32 words[kBanks] = {};
  u64 next = 0;
  u32 most = 0;
  for (u32 at = 0; at < sorted.count; ++at) {
    u64 first = sorted.offsets[at] / kBankBytes;
    u64 last = (sorted.offsets[at] + bytes - 1) / kBankBytes;
    for (u64 word = first < next ? next : first; word <= last; ++word)
      if (++words[word % kBanks] > most) most = words[word % kBanks];
    if (last >= next) next = last + 1;
  }
  return most;
}

const char* name_of(Worker* worker, u32 memory) {
  return memory < kFirstThreadgroupMemory
             ? nullptr
             : worker->arrays[memory - kFirstThreadgroupMemory].name;
}

void count_lines(Worker* worker, u32 number) {
  Gathering* gathering = worker->tracer->gathering;
  const Group& group = gathering->open[number];
  u64* values = worker->tracer->counters[gathering->open_counters[number]].values;
  Sorted sorted(group);
  values[kAccesses] += 1;
  if (group.memory >= kFirstThreadgroupMemory) {
    values[kBankCycles] += bank_cycles(sorted, group.bytes);
    return;
  }
  u64 residue = worker->tracer->trace->memories[group.memory].residue;
  values[kLines128] += distinct(sorted, group.bytes, residue, 7);
  values[kLines64] += distinct(sorted, group.bytes, residue, 6);
  values[kLines32] += distinct(sorted, group.bytes, residue, 5);
}

// Whether `later` continues `earlier` in every lane, `distance` bytes further on.
bool continues(const Group& earlier, const Group& later, u64 distance) {
  for (u32 lane = 0; lane < kLanes; ++lane)
    if (earlier.lanes >> lane & 1 &&
        earlier.offsets[lane] + distance != later.offsets[lane])
      return false;
  return true;
}

// A GPU's compiler makes one wide access of neighbouring narrow ones.
bool merge(Group& open, const Group& group) {
  if (open.memory != group.memory || open.kind != group.kind ||
      open.lanes != group.lanes || open.bytes + group.bytes > kWidest)
    return false;
  bool before = continues(group, open, group.bytes);
  if (!before && !continues(open, group, open.bytes)) return false;
  if (before) {
    for (u32 lane = 0; lane < kLanes; ++lane) open.offsets[lane] = group.offsets[lane];
  }
  open.bytes += group.bytes;
  return true;
}

void open(Worker* worker, const Group& group, u32 counter) {
  Gathering* gathering = worker->tracer->gathering;
  for (u32 at = 0; at < gathering->opened; ++at)
    if (merge(gathering->open[at], group)) return;
  if (gathering->opened == kOpen) {
    count_lines(worker, 0);
    gathering->opened -= 1;
    for (u32 at = 0; at < gathering->opened; ++at) {
      gathering->open[at] = gathering->open[at + 1];
      gathering->open_counters[at] = gathering->open_counters[at + 1];
    }
  }
  gathering->open[gathering->opened] = group;
  gathering->open_counters[gathering->opened++] = counter;
}

// Whether the same lanes have done the same before, since the last meeting.
bool repeats(Gathering* gathering, const Group& group, u64 mask) {
  u64 hash = mix(mix(group.lanes, u64(group.kind) << 32 | group.bytes), group.memory);
  for (u32 lane = 0; lane < kLanes; ++lane)
    if (group.lanes >> lane & 1) hash = mix(hash, group.offsets[lane]);
  hash |= 1;
  for (u64 at = hash >> 20 & mask;; at = (at + 1) & mask) {
    if (gathering->seen[at] == hash) return true;
    if (gathering->seen[at]) continue;
    gathering->seen[at] = hash;
    return false;
  }
}

void count(Worker* worker, const Group& group, u64 mask) {
  Tracer* tracer = worker->tracer;
  Counter& counter =
      counter_of(worker, group.site, group.memory, name_of(worker, group.memory));
  u32 number = u32(&counter - tracer->counters);
  if (is_atomic(group.kind)) {
    counter.values[kOperations] += u32(__builtin_popcount(group.lanes));
    return;
  }
  bool repeated = repeats(tracer->gathering, group, mask);
  u32 value = (group.kind == Kind::kRead ? kReadBytes : kWrittenBytes) + repeated;
  counter.values[value] += distinct(Sorted(group), group.bytes, 0, 0);
  if (repeated) return;
  if (group.kind == Kind::kRead)
    counter.values[kLaneReadBytes] += group.bytes * u32(__builtin_popcount(group.lanes));
  open(worker, group, number);
}

void begin(Group& group, const Entry& entry) {
  group.site = entry.site;
  group.memory = entry.memory;
  group.lanes = 0;
  group.bytes = entry.bytes;
  group.kind = entry.kind;
}

void add(Group& group, u32 lane, const Entry& entry) {
  group.lanes |= 1u << lane;
  group.offsets[lane] = entry.offset;
}

u64 table_mask(u64 entries) {
  u64 size = 64;
  while (size < 2 * entries) size *= 2;
  return size - 1;
}

// The group of the `occurrence`-th execution of an instruction.
Group& group_of(Gathering* gathering, const Entry& entry, u32 occurrence, u64 mask) {
  u64 hash = mix(mix(entry.site, entry.memory), occurrence) >> 20;
  for (u64 at = hash & mask;; at = (at + 1) & mask) {
    u32 number = gathering->found[at];
    if (!number) {
      number = gathering->found[at] = ++gathering->used;
      gathering->occurrence[number - 1] = occurrence;
      begin(gathering->groups[number - 1], entry);
    }
    Group& group = gathering->groups[number - 1];
    if (group.site == entry.site && group.memory == entry.memory &&
        gathering->occurrence[number - 1] == occurrence)
      return group;
  }
}

void gather(Worker* worker, u32 first, u64 mask) {
  Tracer* tracer = worker->tracer;
  Gathering* gathering = tracer->gathering;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const Entry* log = tracer->logs + (first + lane) * kLogLength;
    u64 length = tracer->lengths[first + lane];
    for (u64 at = 0; at < length; ++at) {
      u32 occurrence = tracer->occurrences[log[at].site]++;
      add(group_of(gathering, log[at], occurrence, mask), lane, log[at]);
    }
    for (u64 at = 0; at < length; ++at) tracer->occurrences[log[at].site] = 0;
  }
}

// Whether all lanes have executed the same instructions.
bool in_step(const Tracer* tracer, u32 first, u32 lanes) {
  u64 length = tracer->lengths[first];
  const Entry* leading = tracer->logs + first * kLogLength;
  for (u32 lane = 1; lane < lanes; ++lane) {
    if (tracer->lengths[first + lane] != length) return false;
    const Entry* log = leading + lane * kLogLength;
    for (u64 at = 0; at < length; ++at)
      if (log[at].site != leading[at].site || log[at].memory != leading[at].memory)
        return false;
  }
  return true;
}

void count_in_step(Worker* worker, u32 first, u32 lanes, u64 mask) {
  const Tracer* tracer = worker->tracer;
  const Entry* leading = tracer->logs + first * kLogLength;
  for (u64 at = 0; at < tracer->lengths[first]; ++at) {
    Group group;
    begin(group, leading[at]);
    for (u32 lane = 0; lane < lanes; ++lane)
      add(group, lane, leading[lane * kLogLength + at]);
    count(worker, group, mask);
  }
}

void count_apart(Worker* worker, u32 first, u64 mask) {
  Gathering* gathering = worker->tracer->gathering;
  gather(worker, first, mask);
  for (u32 number = 0; number < gathering->used; ++number)
    count(worker, gathering->groups[number], mask);
  gathering->used = 0;
  memset(gathering->found, 0, (mask + 1) * sizeof *gathering->found);
}

}  // namespace

u64 gathering_bytes() { return sizeof(Gathering); }

Counter& counter_of(Worker* worker, u32 site, u32 memory, const char* name) {
  Tracer* tracer = worker->tracer;
  u32* link = &tracer->first_counter[site];
  while (*link) {
    Counter& counter = tracer->counters[*link - 1];
    if (counter.memory == memory) return counter;
    link = &counter.next;
  }
  *link = ++tracer->counter_count;
  Counter& counter = tracer->counters[tracer->counter_count - 1];
  counter.site = site;
  counter.memory = memory;
  counter.name = name;
  return counter;
}

void count_accesses(Worker* worker, u32 simdgroup) {
  Tracer* tracer = worker->tracer;
  u32 first = simdgroup * kLanes;
  u32 lanes = u32(__builtin_popcount(worker->view.simdgroups[simdgroup].exist));
  u64 entries = 0, longest = 0;
  for (u32 lane = 0; lane < lanes; ++lane) {
    u64 length = tracer->lengths[first + lane];
    entries += length;
    if (length > longest) longest = length;
  }
  if (!entries) return;
  bool same = in_step(tracer, first, lanes);
  u64 mask = table_mask(same ? longest : entries);
  if (same)
    count_in_step(worker, first, lanes, mask);
  else
    count_apart(worker, first, mask);
  Gathering* gathering = tracer->gathering;
  for (u32 number = 0; number < gathering->opened; ++number)
    count_lines(worker, number);
  gathering->opened = 0;
  memset(gathering->seen, 0, (mask + 1) * sizeof *gathering->seen);
  for (u32 lane = 0; lane < lanes; ++lane) tracer->lengths[first + lane] = 0;
}

}  // namespace emu
