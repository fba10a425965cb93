// metal_atomic: device and threadgroup memory only.
#pragma once
#include "simd.h"

namespace metal {

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> ||
                    is_same_v<T, bool> || is_same_v<T, ulong>,
                "atomics are int, uint, float, bool or ulong");

 private:
  T value;
};

#define EMU_UPDATE(space, name) \
  template <class T>            \
  T name(volatile space atomic<T>*, emu::given<T>, memory_order);
#define EMU_SPACE(space)                                                              \
  template <class T>                                                                  \
  void atomic_store_explicit(volatile space atomic<T>*, emu::given<T>, memory_order); \
  template <class T>                                                                  \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);              \
  template <class T>                                                                  \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*,    \
                                             emu::given<T>, memory_order,             \
                                             memory_order);                           \
  EMU_UPDATE(space, atomic_exchange_explicit)                                         \
  EMU_UPDATE(space, atomic_fetch_add_explicit)                                        \
  EMU_UPDATE(space, atomic_fetch_and_explicit)                                        \
  EMU_UPDATE(space, atomic_fetch_max_explicit)                                        \
  EMU_UPDATE(space, atomic_fetch_min_explicit)                                        \
  EMU_UPDATE(space, atomic_fetch_or_explicit)                                         \
  EMU_UPDATE(space, atomic_fetch_sub_explicit)                                        \
  EMU_UPDATE(space, atomic_fetch_xor_explicit)
EMU_SPACE(device)
EMU_SPACE(threadgroup)
#undef EMU_SPACE
#undef EMU_UPDATE
// The only operations on 64 bits: in device memory, without a result.
void atomic_max_explicit(volatile device atomic<ulong>*, ulong, memory_order);
void atomic_min_explicit(volatile device atomic<ulong>*, ulong, memory_order);

void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);

}  // namespace metal
