// metal_simdgroup and metal_quadgroup. Every function here is a meeting of all lanes.
#pragma once
#include "math.h"

namespace emu {

// One lane's part of an exchange: what it gives, and what it sees of the others.
template <class T>
struct Meeting {
  Simdgroup& group;
  u32 lane;
  u32 parity;

  METAL_FUNC explicit Meeting(const T& value) : Meeting(self(), value) {}
  METAL_FUNC Meeting(Self self, const T& value)
      : group(self.simdgroup()), lane(self.lane()), parity(group.parity[lane]) {
    static_assert(sizeof(T) <= sizeof group.exchange.values[0][0], "type too large");
    group.parity[lane] = parity ^ 1;
    __builtin_memcpy(group.exchange.values[parity][lane], &value, sizeof(T));
  }
  METAL_FUNC T of(u32 other) const {
    T value;
    __builtin_memcpy(&value, group.exchange.values[parity][other % kLanes], sizeof(T));
    return value;
  }
  METAL_FUNC bool exists(u32 other) const {
    return other < kLanes && (group.exist >> other & 1);
  }
  template <class R>
  METAL_FUNC void publish(u32 to, const R& result) {
    __builtin_memcpy(group.exchange.results[to], &result, sizeof(R));
  }
  template <class R>
  METAL_FUNC R result() const {
    R result;
    __builtin_memcpy(&result, group.exchange.results[lane], sizeof(R));
    return result;
  }
};

// Results that depend on all lanes: the last one computes them with `reduce`.
template <class R, class T, class Reduce>
METAL_FUNC R meet(const Operation& operation, const T& value, Reduce reduce) {
  Meeting<T> meeting(value);
  if (mslemu_arrive(&operation)) reduce(meeting);
  return meeting.template result<R>();
}

// A value that another lane has given; its own if that lane does not exist. Trace mode
// reports lanes that no simdgroup has; those of a quad are counted from kLanes on then.
template <class T, class Choose>
METAL_FUNC T fetch(const Operation& operation, const T& value, Choose choose) {
  Meeting<T> meeting(value);
  mslemu_arrive(&operation);
  u32 source = choose(meeting.lane);
#ifdef MSLEMU_TRACE
  if (source >= kLanes) mslemu_no_lane(&operation, source);
#endif
  return meeting.exists(source) ? meeting.of(source) : value;
}

template <class T, class Combine>
METAL_FUNC T reduce(const Operation& operation, const T& value, Combine combine) {
  return meet<T>(operation, value, [&](Meeting<T>& meeting) EMU_INLINE {
    T total = meeting.of(0);
    for (u32 lane = 1; lane < kLanes; ++lane)
      if (meeting.exists(lane)) total = combine(total, meeting.of(lane));
    for (u32 lane = 0; lane < kLanes; ++lane) meeting.publish(lane, total);
  });
}

template <class T, class Combine>
METAL_FUNC T scan(const Operation& operation, const T& value, T identity,
                  bool inclusive, Combine combine) {
  return meet<T>(operation, value, [&](Meeting<T>& meeting) EMU_INLINE {
    T total = identity;
    for (u32 lane = 0; lane < kLanes && meeting.exists(lane); ++lane) {
      T next = combine(total, meeting.of(lane));
      meeting.publish(lane, inclusive ? next : total);
      total = next;
    }
  });
}

template <class T, class Combine>
METAL_FUNC T quad_reduce(const Operation& operation, const T& value, Combine combine) {
  Meeting<T> meeting(value);
  mslemu_arrive(&operation);
  u32 quad = meeting.lane & ~3u;
  T total = meeting.of(quad);
  for (u32 lane = quad + 1; lane < quad + 4; ++lane)
    if (meeting.exists(lane)) total = combine(total, meeting.of(lane));
  return total;
}

// Combines the lanes of the quad that come before this one, itself included if wanted.
template <class T, class Combine>
METAL_FUNC T quad_scan(const Operation& operation, const T& value, T identity,
                       bool inclusive, Combine combine) {
  Meeting<T> meeting(value);
  mslemu_arrive(&operation);
  T total = identity;
  for (u32 lane = meeting.lane & ~3u; lane < meeting.lane; ++lane)
    total = combine(total, meeting.of(lane));
  return inclusive ? combine(total, value) : total;
}

METAL_FUNC u32 ballot(const Operation& operation, bool value) {
  return meet<u32>(operation, value, [&](Meeting<bool>& meeting) EMU_INLINE {
    u32 votes = 0;
    for (u32 lane = 0; lane < kLanes; ++lane)
      if (meeting.exists(lane) && meeting.of(lane)) votes |= 1u << lane;
    for (u32 lane = 0; lane < kLanes; ++lane) meeting.publish(lane, votes);
  });
}

inline u32 lanes_here() { return self().simdgroup().exist; }

}  // namespace emu

// Each function names its operation once, for the reports.
#define EMU_OPERATION(name, kind) \
  static constexpr emu::Operation operation { name, false, emu::Operations::kind }

namespace metal {

METAL_FUNC void threadgroup_barrier(mem_flags flags) {
  mslemu_threadgroup_barrier(uint(flags));
}
METAL_FUNC void simdgroup_barrier(mem_flags flags) {
  if (flags == mem_flags::mem_none) return;  // orders nothing: a hint to the scheduler
  EMU_OPERATION("simdgroup_barrier", kBarrier);
#ifdef MSLEMU_TRACE
  mslemu_order_simdgroup(uint(flags));
#endif
  mslemu_arrive(&operation);
}

#define EMU_REDUCE(name, expression)                                            \
  template <class T>                                                            \
  METAL_FUNC T simd_##name(T value) {                                           \
    EMU_OPERATION("simd_" #name, kSimd);                                        \
    return emu::reduce(operation, value,                                        \
                       [](T a, T b) EMU_INLINE { return T(expression); });      \
  }                                                                             \
  template <class T>                                                            \
  METAL_FUNC T quad_##name(T value) {                                           \
    EMU_OPERATION("quad_" #name, kSimd);                                        \
    return emu::quad_reduce(operation, value,                                   \
                            [](T a, T b) EMU_INLINE { return T(expression); }); \
  }
EMU_REDUCE(sum, a + b)
EMU_REDUCE(product, a* b)
EMU_REDUCE(max, metal::max(a, b))
EMU_REDUCE(min, metal::min(a, b))
EMU_REDUCE(and, a& b)
EMU_REDUCE(or, a | b)
EMU_REDUCE(xor, a ^ b)
#undef EMU_REDUCE

#define EMU_SCAN(name, start, inclusive, expression)                          \
  template <class T>                                                          \
  METAL_FUNC T simd_prefix_##name(T value) {                                  \
    EMU_OPERATION("simd_prefix_" #name, kSimd);                               \
    return emu::scan(operation, value, T(start), inclusive,                   \
                     [](T a, T b) EMU_INLINE { return T(expression); });      \
  }                                                                           \
  template <class T>                                                          \
  METAL_FUNC T quad_prefix_##name(T value) {                                  \
    EMU_OPERATION("quad_prefix_" #name, kSimd);                               \
    return emu::quad_scan(operation, value, T(start), inclusive,              \
                          [](T a, T b) EMU_INLINE { return T(expression); }); \
  }
EMU_SCAN(exclusive_sum, 0, false, a + b)
EMU_SCAN(inclusive_sum, 0, true, a + b)
EMU_SCAN(exclusive_product, 1, false, a* b)
EMU_SCAN(inclusive_product, 1, true, a* b)
#undef EMU_SCAN

// Shuffles. `lane` below is the receiving lane.
#define EMU_FETCH(name, parameter, source)                        \
  template <class T>                                              \
  METAL_FUNC T name(T value, ushort parameter) {                  \
    EMU_OPERATION(#name, kShuffle);                               \
    return emu::fetch(operation, value,                           \
                      [=]([[maybe_unused]] uint lane)             \
                          EMU_INLINE -> uint { return source; }); \
  }
EMU_FETCH(simd_shuffle, from, from)
EMU_FETCH(simd_broadcast, from, from)
EMU_FETCH(simd_shuffle_xor, mask, lane ^ mask)
EMU_FETCH(simd_shuffle_up, delta, lane >= delta ? lane - delta : lane)
EMU_FETCH(simd_shuffle_down, delta, lane + delta < 32 ? lane + delta : lane)
EMU_FETCH(simd_shuffle_rotate_up, delta, (lane + 32u - delta % 32u) % 32u)
EMU_FETCH(simd_shuffle_rotate_down, delta, (lane + delta) % 32u)
EMU_FETCH(quad_shuffle, from, from < 4 ? (lane & ~3u) + from : emu::kLanes + from)
EMU_FETCH(quad_broadcast, from, from < 4 ? (lane & ~3u) + from : emu::kLanes + from)
EMU_FETCH(quad_shuffle_xor, mask, mask < 4 ? lane ^ mask : emu::kLanes + mask)
EMU_FETCH(quad_shuffle_up, delta, lane % 4u >= delta ? lane - delta : lane)
EMU_FETCH(quad_shuffle_down, delta, lane % 4u + delta < 4u ? lane + delta : lane)
EMU_FETCH(quad_shuffle_rotate_up, delta, (lane & ~3u) + (lane - delta) % 4u)
EMU_FETCH(quad_shuffle_rotate_down, delta, (lane & ~3u) + (lane + delta) % 4u)
#undef EMU_FETCH

template <class T>
METAL_FUNC T simd_broadcast_first(T value) {
  EMU_OPERATION("simd_broadcast_first", kShuffle);
  return emu::fetch(operation, value, [](uint) EMU_INLINE -> uint { return 0; });
}
template <class T>
METAL_FUNC T quad_broadcast_first(T value) {
  EMU_OPERATION("quad_broadcast_first", kShuffle);
  return emu::fetch(operation, value,
                    [](uint lane) EMU_INLINE -> uint { return lane & ~3u; });
}
// Data slides in from a second operand at the open end. The lanes slide in sets of
// `modulo` neighbours.
#define EMU_FILL(name, most, step, stays)                                  \
  template <class T>                                                       \
  METAL_FUNC T name(T value, T fill, ushort delta, ushort modulo = most) { \
    EMU_OPERATION(#name, kShuffle);                                        \
    uint lane = emu::self().lane(), in_set = lane % modulo;                \
    uint from = lane - in_set + (in_set + step) % modulo;                  \
    struct Pair {                                                          \
      T value, fill;                                                       \
    };                                                                     \
    Pair pair = emu::fetch(operation, Pair{value, fill},                   \
                           [=](uint) EMU_INLINE -> uint { return from; }); \
    return stays ? pair.value : pair.fill;                                 \
  }
EMU_FILL(simd_shuffle_and_fill_up, 32, modulo - delta % modulo, in_set >= delta)
EMU_FILL(simd_shuffle_and_fill_down, 32, delta, in_set + delta < modulo)
EMU_FILL(quad_shuffle_and_fill_up, 4, modulo - delta % modulo, in_set >= delta)
EMU_FILL(quad_shuffle_and_fill_down, 4, delta, in_set + delta < modulo)
#undef EMU_FILL

class simd_vote {
 public:
  using vote_t = ulong;
  METAL_FUNC explicit constexpr simd_vote(vote_t votes = 0) : votes_(votes) {}
  METAL_FUNC explicit constexpr operator vote_t() const { return votes_; }
  METAL_FUNC bool any() const { return votes_ != 0; }
  METAL_FUNC bool all() const { return uint(votes_) == emu::lanes_here(); }

 private:
  vote_t votes_;
};

METAL_FUNC simd_vote simd_ballot(bool value) {
  EMU_OPERATION("simd_ballot", kSimd);
  return simd_vote(emu::ballot(operation, value));
}
METAL_FUNC simd_vote simd_active_threads_mask() {
  EMU_OPERATION("simd_active_threads_mask", kSimd);
  return simd_vote(emu::ballot(operation, true));
}
METAL_FUNC bool simd_any(bool value) {
  EMU_OPERATION("simd_any", kSimd);
  return emu::ballot(operation, value) != 0;
}
METAL_FUNC bool simd_all(bool value) {
  EMU_OPERATION("simd_all", kSimd);
  return emu::ballot(operation, !value) == 0;
}
METAL_FUNC bool simd_is_first() { return emu::self().lane() == 0; }
METAL_FUNC bool quad_any(bool value) { return quad_or(uint(value)) != 0; }
METAL_FUNC bool quad_all(bool value) { return quad_and(uint(value)) != 0; }
METAL_FUNC bool simd_is_helper_thread() { return false; }
METAL_FUNC bool quad_is_first() { return emu::self().lane() % 4 == 0; }
METAL_FUNC bool quad_is_helper_thread() { return false; }

class quad_vote {
 public:
  using vote_t = ushort;
  METAL_FUNC explicit constexpr quad_vote(vote_t votes = 0) : votes_(votes) {}
  METAL_FUNC explicit constexpr operator vote_t() const { return votes_; }
  METAL_FUNC bool any() const { return votes_ != 0; }
  METAL_FUNC bool all() const {
    return votes_ == (emu::lanes_here() >> (emu::self().lane() & ~3u) & 15u);
  }

 private:
  vote_t votes_;
};
METAL_FUNC quad_vote quad_ballot(bool value) {
  return quad_vote(ushort(quad_or(uint(value) << emu::self().lane() % 4)));
}
METAL_FUNC quad_vote quad_active_threads_mask() { return quad_ballot(true); }

}  // namespace metal
