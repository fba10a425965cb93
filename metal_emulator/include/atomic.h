// metal_atomic: true atomics, since threadgroups run on several host threads.
#pragma once
#include "simd.h"

namespace metal {

template <class T>
struct atomic {
  T value;
};

namespace detail {

enum Does : uint { kLoads = 1, kStores = 2, kBoth = 3 };

template <class T>
METAL_FUNC ulong bits(const T& value) {
  ulong result = 0;
  __builtin_memcpy(&result, &value, sizeof(T));
  return result;
}

// Around an atomic operation that finds `before` and leaves `after`. The run time sees
// who waits for a change; trace mode follows what it orders.
template <class T>
struct Watched {
  const volatile atomic<T>* object;
  Does does;
  T before, after;

  METAL_FUNC Watched(const volatile atomic<T>* object, Does does)
      : object(object), does(does) {
#ifdef MSLEMU_TRACE
    mslemu_atomic(object, sizeof(T), does);
#endif
  }
  METAL_FUNC ~Watched() {
#ifdef MSLEMU_TRACE
    mslemu_atomic_done(object, does);
#endif
    if (does & kLoads) mslemu_poll(object, bits(before), bits(after));
  }
};

}  // namespace detail

// Orders are taken literally but never made weaker; Metal offers only relaxed ones
// anyway.
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* object, U desired,
                                      memory_order) {
  detail::Watched<T> watched(object, detail::kStores);
  watched.after = T(desired);
  __atomic_store(&object->value, &watched.after, __ATOMIC_RELAXED);
}
template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  detail::Watched<T> watched(object, detail::kLoads);
  __atomic_load(&object->value, &watched.before, __ATOMIC_RELAXED);
  return watched.after = watched.before;
}
template <class T, class U>
METAL_FUNC T atomic_exchange_explicit(volatile atomic<T>* object, U desired,
                                      memory_order) {
  detail::Watched<T> watched(object, detail::kBoth);
  watched.after = T(desired);
  __atomic_exchange(&object->value, &watched.after, &watched.before, __ATOMIC_RELAXED);
  return watched.before;
}
template <class T, class U>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object,
                                                      T* expected, U desired,
                                                      memory_order, memory_order) {
  T value = T(desired);
  detail::Watched<T> watched(object, detail::kBoth);
  bool exchanged = __atomic_compare_exchange(&object->value, expected, &value, true,
                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  watched.before = *expected;
  watched.after = exchanged ? value : *expected;
  return exchanged;
}

namespace detail {

template <class T, class Change>
METAL_FUNC T update(volatile atomic<T>* object, Change change) {
  Watched<T> watched(object, kBoth);
  __atomic_load(&object->value, &watched.before, __ATOMIC_RELAXED);
  do {
    watched.after = change(watched.before);
  } while (!__atomic_compare_exchange(&object->value, &watched.before, &watched.after,
                                      true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return watched.before;
}

}  // namespace detail

#define EMU_FETCH_UPDATE(name, expression)                                           \
  template <class T, class U>                                                        \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile atomic<T>* object, U operand, \
                                              memory_order) {                        \
    T b = T(operand);                                                                \
    return detail::update(object, [b](T a) EMU_INLINE { return T(expression); });    \
  }
EMU_FETCH_UPDATE(add, a + b)
EMU_FETCH_UPDATE(sub, a - b)
EMU_FETCH_UPDATE(and, a& b)
EMU_FETCH_UPDATE(or, a | b)
EMU_FETCH_UPDATE(xor, a ^ b)
EMU_FETCH_UPDATE(min, b < a ? b : a)
EMU_FETCH_UPDATE(max, a < b ? b : a)
#undef EMU_FETCH_UPDATE
// The operations on 64 bits, without a result.
METAL_FUNC void atomic_max_explicit(volatile atomic<ulong>* object, ulong operand,
                                    memory_order order) {
  atomic_fetch_max_explicit(object, operand, order);
}
METAL_FUNC void atomic_min_explicit(volatile atomic<ulong>* object, ulong operand,
                                    memory_order order) {
  atomic_fetch_min_explicit(object, operand, order);
}

METAL_FUNC void atomic_thread_fence(
    [[maybe_unused]] mem_flags flags, [[maybe_unused]] memory_order order,
    [[maybe_unused]] thread_scope scope = thread_scope_device) {
#ifdef MSLEMU_TRACE
  mslemu_fence(uint(flags), order, scope);
#endif
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace metal
