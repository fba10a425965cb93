// Scalars, vectors, packed vectors, and the conversions between them.
//
// Metal's vectors are clang's, which have swizzles and arithmetic but no constructors:
// the front end turns `float4(a, b)` into emu::make<float4>(a, b).
#pragma once
#include "abi.h"

#define EMU_INLINE __attribute__((always_inline))  // of a lambda

using half = _Float16;

#include "names.h"

// `1.0h` and `1.0bf` arrive as `1.0_half` and `1.0_bfloat`.
constexpr half operator""_half(long double value) { return half(value); }
constexpr bfloat operator""_bfloat(long double value) { return bfloat(float(value)); }

namespace emu {

template <class T>
struct Bare : metal::remove_cv<T> {};
template <class T>
struct Bare<T&> : metal::remove_cv<T> {};
template <class T>
struct Bare<T&&> : metal::remove_cv<T> {};
template <class T>
using bare = typename Bare<T>::type;

}  // namespace emu

namespace metal {

template <class T>
struct packed_vec<T, 2> {
  T x, y;
  packed_vec() = default;
  constexpr packed_vec(vec<T, 2> v) : x(v[0]), y(v[1]) {}
  operator vec<T, 2>() const { return vec<T, 2>{x, y}; }
  EMU_ELEMENTS(T, int, (&x)[i])
};
template <class T>
struct packed_vec<T, 3> {
  T x, y, z;
  packed_vec() = default;
  constexpr packed_vec(vec<T, 3> v) : x(v[0]), y(v[1]), z(v[2]) {}
#ifdef MSLEMU_TRACE
  // Element by element: clang tells of no access to three elements at once.
  constexpr packed_vec(const packed_vec& other) : x(other.x), y(other.y), z(other.z) {}
  constexpr packed_vec& operator=(const packed_vec& other) {
    return x = other.x, y = other.y, z = other.z, *this;
  }
#endif
  operator vec<T, 3>() const { return vec<T, 3>{x, y, z}; }
  EMU_ELEMENTS(T, int, (&x)[i])
};
template <class T>
struct packed_vec<T, 4> {
  T x, y, z, w;
  packed_vec() = default;
  constexpr packed_vec(vec<T, 4> v) : x(v[0]), y(v[1]), z(v[2]), w(v[3]) {}
  operator vec<T, 4>() const { return vec<T, 4>{x, y, z, w}; }
  EMU_ELEMENTS(T, int, (&x)[i])
};

}  // namespace metal

namespace emu {

template <class T>
constexpr bool is_vector = Shape<bare<T>>::size != 0;
template <class T>
using element_of = typename Shape<bare<T>>::element;
template <class T>
constexpr int size_of = Shape<bare<T>>::size ? Shape<bare<T>>::size : 1;

// One scalar to another. half and bfloat do not convert into each other in clang.
template <class To, class From>
METAL_FUNC constexpr To scalar(From value) {
  if constexpr ((metal::is_same_v<To, bfloat> && metal::is_same_v<From, half>) ||
                (metal::is_same_v<To, half> && metal::is_same_v<From, bfloat>))
    return static_cast<To>(static_cast<float>(value));
  else
    return static_cast<To>(value);
}

template <class Element, int Capacity>
struct Gathered {
  Element values[Capacity];
  int count = 0;

  template <class T>
  METAL_FUNC constexpr void add(const T& value) {
    if constexpr (is_vector<T>) {
      for (int i = 0; i < size_of<T>; ++i)
        values[count++] = scalar<Element>(element_of<T>(value[i]));
    } else {
      values[count++] = scalar<Element>(value);
    }
  }
};

// T(arguments...), as Metal means it: elements are converted, vectors are strung
// together, a single scalar fills a vector.
template <class T, class... Arguments>
METAL_FUNC constexpr T make(Arguments... arguments) {
  if constexpr (sizeof...(Arguments) == 0) {
    return T{};
  } else if constexpr (is_vector<T>) {
    using Element = element_of<T>;
    constexpr int size = size_of<T>;
    constexpr int given = (size_of<Arguments> + ... + 0);
    constexpr bool splat = sizeof...(Arguments) == 1 && !(is_vector<Arguments> || ...);
    static_assert(splat || given == size, "wrong number of elements for this vector");
    Gathered<Element, (given > size ? given : size)> gathered{};
    (gathered.add(arguments), ...);
    const Element* v = gathered.values;
    constexpr int step = splat ? 0 : 1;
    if constexpr (size == 2)
      return metal::vec<Element, 2>{v[0], v[step]};
    else if constexpr (size == 3)
      return metal::vec<Element, 3>{v[0], v[step], v[2 * step]};
    else
      return metal::vec<Element, 4>{v[0], v[step], v[2 * step], v[3 * step]};
  } else if constexpr (sizeof...(Arguments) == 1 && __is_arithmetic(T) &&
                       (__is_arithmetic(Arguments) && ...)) {
    return scalar<T>(arguments...);
  } else {
    return T(arguments...);
  }
}

// static_cast. By value, unless it makes a reference: no reference binds to an element
// of a vector.
template <class To, class From, class = metal::enable_if_t<!__is_reference(To)>>
METAL_FUNC constexpr To cast(From value) {
  if constexpr (is_vector<To> || (__is_arithmetic(To) && __is_arithmetic(From)))
    return make<To>(value);
  else
    return static_cast<To>(value);
}
template <class To, class From, class = metal::enable_if_t<__is_reference(To)>,
          class = void>
METAL_FUNC constexpr To cast(From&& value) {
  return static_cast<To>(static_cast<From&&>(value));
}

}  // namespace emu

EMU_VECTORS(bool)

namespace metal {

using ::half;

template <class T>
using remove_addrspace_t = T;

}  // namespace metal
