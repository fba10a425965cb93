// First line of every translation unit of the emulator: the Metal language, in C++.
//
// One flat address space: the qualifiers mean nothing here, except that `constant` data
// cannot be written. Their check is the business of the static checker, not of this
// build.
//
// A macro guards it, because a precompiled header does not know its own file again once
// an installation or a checkout has written that anew.
#ifndef MSLEMU_KERNEL
#define MSLEMU_KERNEL
#include "mlx.h"

namespace emu {

// Kernel parameters take what they need: a pointer to a buffer, or a reference into it.
struct Pointer {
  void* address;
  template <class T>
  METAL_FUNC operator T*() const {
    return static_cast<T*>(address);
  }
};
struct Reference {
  void* address;
  template <class T>
  METAL_FUNC operator const T&() const {
    return *static_cast<const T*>(address);
  }
};

struct MutableReference {
  void* address;
  template <class T>
  METAL_FUNC operator T&() const {
    return *static_cast<T*>(address);
  }
};

METAL_FUNC void* buffer(u32 number) {
  return self().worker->threadgroup.buffers[number];
}
METAL_FUNC Pointer pointer(u32 number) { return {buffer(number)}; }
METAL_FUNC Reference reference(u32 number) { return {buffer(number)}; }
METAL_FUNC MutableReference mutable_reference(u32 number) { return {buffer(number)}; }

template <class T, u32 Slot>
METAL_FUNC T& threadgroup_variable(const char* name) {
  static_assert(alignof(T) <= 16, "threadgroup variables are aligned to 16 bytes");
  return *static_cast<T*>(mslemu_threadgroup_memory(Slot, sizeof(T), name));
}

// A parameter in threadgroup memory, as large as its type.
template <u32 Slot>
struct ThreadgroupReference {
  const char* name;
  template <class T>
  METAL_FUNC operator T&() const {
    return threadgroup_variable<T, Slot>(name);
  }
};

template <class T>
METAL_FUNC constexpr T&& whole(T&& object) {
  return static_cast<T&&>(object);
}

METAL_FUNC uint3 triple(Coordinates value) { return uint3{value.x, value.y, value.z}; }

// The attributes of a kernel's parameters, by their Metal names.
namespace attribute {

METAL_FUNC const Threadgroup& here() { return self().worker->threadgroup; }
METAL_FUNC uint quotient(uint a, uint b) { return (a + b - 1) / b; }

METAL_FUNC uint thread_index_in_threadgroup() { return self().index; }
METAL_FUNC uint thread_index_in_simdgroup() { return self().lane(); }
METAL_FUNC uint thread_index_in_quadgroup() { return self().index % 4; }
METAL_FUNC uint simdgroup_index_in_threadgroup() { return self().index / kLanes; }
METAL_FUNC uint quadgroup_index_in_threadgroup() { return self().index / 4; }
METAL_FUNC uint simdgroups_per_threadgroup() {
  return quotient(here().threads, kLanes);
}
METAL_FUNC uint quadgroups_per_threadgroup() { return quotient(here().threads, 4); }
METAL_FUNC uint3 threads_per_threadgroup() { return triple(here().size); }
METAL_FUNC uint3 dispatch_threads_per_threadgroup() { return triple(here().nominal); }
METAL_FUNC uint nominal_threads() {
  const Coordinates& size = here().nominal;
  return size.x * size.y * size.z;
}
METAL_FUNC uint dispatch_simdgroups_per_threadgroup() {
  return quotient(nominal_threads(), kLanes);
}
METAL_FUNC uint dispatch_quadgroups_per_threadgroup() {
  return quotient(nominal_threads(), 4);
}
METAL_FUNC uint3 threadgroup_position_in_grid() { return triple(here().position); }
METAL_FUNC uint3 threadgroups_per_grid() { return triple(here().count); }
METAL_FUNC uint3 threads_per_grid() { return triple(here().grid); }
METAL_FUNC uint3 grid_size() { return triple(here().grid); }
METAL_FUNC uint3 grid_origin() { return uint3{0, 0, 0}; }
METAL_FUNC uint thread_execution_width() { return kLanes; }
METAL_FUNC uint threads_per_simdgroup() { return kLanes; }
METAL_FUNC uint3 thread_position_in_threadgroup() {
  const Coordinates& size = here().size;
  uint index = self().index;
  return uint3{index % size.x, index / size.x % size.y, index / size.x / size.y};
}
METAL_FUNC uint3 thread_position_in_grid() {
  const Threadgroup& group = here();
  uint3 inside = thread_position_in_threadgroup();
  return uint3{group.position.x * group.nominal.x + inside.x,
               group.position.y * group.nominal.y + inside.y,
               group.position.z * group.nominal.z + inside.z};
}

}  // namespace attribute
}  // namespace emu

#define device
#define thread
#define threadgroup
#define constant const
#define kernel
#define coherent(...)
#define restrict __restrict
#define double metal_has_no_double
#define goto metal_has_no_goto
// The front end puts it around a vector in memory of which a component is used. Clang
// checks the alignment of what is referred to.
#ifdef MSLEMU_TRACE
#define emu_whole(...) ::emu::whole(__VA_ARGS__)
#else
#define emu_whole(...) (__VA_ARGS__)
#endif
#endif
