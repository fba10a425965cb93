// Scalars, vectors, packed vectors, conversions and type traits, with address spaces.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
// Functions may be template arguments.
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define device __global
#define threadgroup __local
#define constant const __constant
#define thread __private
// Names that clang defines by itself in this mode.
#define atomic_int metal_atomic_int
#define atomic_uint metal_atomic_uint
#define atomic_float metal_atomic_float
#define atomic_long metal_atomic_long
#define atomic_ulong metal_atomic_ulong

#include "../names.h"

namespace metal {

template <class T>
using remove_addrspace_t = remove_cv_t<T>;

#define EMU_PACKED(size, ...)               \
  template <class T>                        \
  struct packed_vec<T, size> {              \
    T __VA_ARGS__;                          \
    packed_vec() = default;                 \
    constexpr packed_vec(vec<T, size>) {}   \
    operator vec<T, size>() const;          \
    operator vec<T, size>() const constant; \
    EMU_ELEMENTS(T, int, (&x)[i])           \
  };
EMU_PACKED(2, x, y)
EMU_PACKED(3, x, y, z)
EMU_PACKED(4, x, y, z, w)
#undef EMU_PACKED

}  // namespace metal

namespace emu {

template <class T>
constexpr constant int size_of = Shape<T>::size;
template <class T>
constexpr constant int elements_of = Shape<T>::size ? Shape<T>::size : 1;
template <class T>
using element_of = typename Shape<T>::element;

// Every number becomes every other one if asked.
template <class To, class From>
constexpr constant bool converts =
    metal::is_arithmetic_v<To> && metal::is_arithmetic_v<From>;
// Clang lacks half to bfloat and back.
template <class To, class From>
constexpr constant bool converts_directly =
    !(metal::is_same_v<To, half> && metal::is_same_v<From, bfloat>) &&
    !(metal::is_same_v<To, bfloat> && metal::is_same_v<From, half>);

// T(arguments...): elements are converted, vectors strung together, a scalar fills one.
template <class T, class... Arguments>
METAL_FUNC constexpr T make(Arguments... arguments) {
  if constexpr (sizeof...(Arguments) == 0) {
    return T{};
  } else if constexpr (size_of<T> != 0) {
    constexpr int given = (elements_of<Arguments> + ... + 0);
    constexpr bool splat =
        sizeof...(Arguments) == 1 && ((size_of<Arguments> == 0) && ...);
    static_assert(splat || given == size_of<T>,
                  "wrong number of elements for this vector");
    static_assert((converts<element_of<T>, element_of<Arguments>> && ...),
                  "an element of a vector is made of a number");
    return T{};
  } else if constexpr (sizeof...(Arguments) == 1 && (converts<T, Arguments> && ...)) {
    if constexpr ((converts_directly<T, Arguments> && ...))
      return T(arguments...);
    else
      return T(float(arguments)...);
  } else {
    return T(arguments...);
  }
}

template <class To, class From>
METAL_FUNC constexpr To cast(From value) {
  if constexpr (size_of<To> != 0 || converts<To, From>)
    return make<To>(value);
  else
    return static_cast<To>(value);
}

template <class T, int>
threadgroup T& threadgroup_variable(const constant char*) {
  static_assert(sizeof(T) > 0, "a threadgroup variable has a complete type");
  __builtin_unreachable();
}

}  // namespace emu

// Clang has no vectors of bool in this mode.
using bool2 = uchar2;
using bool3 = uchar3;
using bool4 = uchar4;

namespace metal {

using ::bool2, ::bool3, ::bool4;

}  // namespace metal
