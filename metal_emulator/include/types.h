// Scalars, vectors, packed vectors, and the conversions between them.
//
// Metal's vectors are clang's, which have swizzles and arithmetic but no constructors:
// the front end turns `float4(a, b)` into emu::make<float4>(a, b).
#pragma once
#include "abi.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define EMU_INLINE __attribute__((always_inline))  // of a lambda

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using bfloat = __bf16;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using uintptr_t = unsigned long;
using intptr_t = long;

// `1.0h` and `1.0bf` arrive as `1.0_half` and `1.0_bfloat`.
constexpr half operator""_half(long double value) { return half(value); }
constexpr bfloat operator""_bfloat(long double value) { return bfloat(float(value)); }

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal

namespace emu {

template <class T, class U>
constexpr bool same = false;
template <class T>
constexpr bool same<T, T> = true;

template <bool Condition, class T = void>
struct EnableIf {};
template <class T>
struct EnableIf<true, T> {
  using type = T;
};
template <bool Condition, class T = void>
using enable_if = typename EnableIf<Condition, T>::type;

template <class T>
struct RemoveQualifiers {
  using type = T;
};
template <class T>
struct RemoveQualifiers<const T> : RemoveQualifiers<T> {};
template <class T>
struct RemoveQualifiers<volatile T> : RemoveQualifiers<T> {};
template <class T>
struct RemoveQualifiers<const volatile T> : RemoveQualifiers<T> {};
template <class T>
struct RemoveQualifiers<T&> : RemoveQualifiers<T> {};
template <class T>
struct RemoveQualifiers<T&&> : RemoveQualifiers<T> {};
template <class T>
using bare = typename RemoveQualifiers<T>::type;

// A parameter's type that takes no part in deduction.
template <class T>
struct Given {
  using type = T;
};
template <class T>
using given = typename Given<T>::type;

// Element type and length of a vector; length 0 means "not a vector".
template <class T>
struct Shape {
  using element = T;
  static constexpr int size = 0;
};
template <class T, int N>
struct Shape<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr int size = N;
};

}  // namespace emu

namespace metal {

// A vector without the vector's alignment.
template <class T, int N>
struct packed_vec;

template <class T>
struct packed_vec<T, 2> {
  T x, y;
  packed_vec() = default;
  constexpr packed_vec(vec<T, 2> v) : x(v[0]), y(v[1]) {}
  operator vec<T, 2>() const { return vec<T, 2>{x, y}; }
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
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
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
template <class T>
struct packed_vec<T, 4> {
  T x, y, z, w;
  packed_vec() = default;
  constexpr packed_vec(vec<T, 4> v) : x(v[0]), y(v[1]), z(v[2]), w(v[3]) {}
  operator vec<T, 4>() const { return vec<T, 4>{x, y, z, w}; }
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

}  // namespace metal

namespace emu {

template <class T, int N>
struct Shape<metal::packed_vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};

template <class T>
constexpr bool is_vector = Shape<bare<T>>::size != 0;
template <class T>
using element_of = typename Shape<bare<T>>::element;
template <class T>
constexpr int size_of = Shape<bare<T>>::size ? Shape<bare<T>>::size : 1;

// One scalar to another. half and bfloat do not convert into each other in clang.
template <class To, class From>
METAL_FUNC constexpr To scalar(From value) {
  if constexpr ((same<To, bfloat> && same<From, half>) ||
                (same<To, half> && same<From, bfloat>))
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
template <class To, class From, class = enable_if<!__is_reference(To)>>
METAL_FUNC constexpr To cast(From value) {
  if constexpr (is_vector<To> || (__is_arithmetic(To) && __is_arithmetic(From)))
    return make<To>(value);
  else
    return static_cast<To>(value);
}
template <class To, class From, class = enable_if<__is_reference(To)>, class = void>
METAL_FUNC constexpr To cast(From&& value) {
  return static_cast<To>(static_cast<From&&>(value));
}

}  // namespace emu

// Metal has these names in its namespace too.
#define EMU_VECTORS(type)                              \
  using type##2 = metal::vec<type, 2>;                 \
  using type##3 = metal::vec<type, 3>;                 \
  using type##4 = metal::vec<type, 4>;                 \
  using packed_##type##2 = metal::packed_vec<type, 2>; \
  using packed_##type##3 = metal::packed_vec<type, 3>; \
  using packed_##type##4 = metal::packed_vec<type, 4>; \
  namespace metal {                                    \
  using ::type##2, ::type##3, ::type##4;               \
  using ::packed_##type##2, ::packed_##type##3, ::packed_##type##4; \
  }

EMU_VECTORS(bool)
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
#undef EMU_VECTORS

namespace metal {

using ::uchar, ::ushort, ::uint, ::ulong, ::bfloat;
using ::int8_t, ::int16_t, ::int32_t, ::int64_t;
using ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t;
using ::size_t, ::ptrdiff_t, ::uintptr_t, ::intptr_t;
using ::half;

template <class To, class From>
METAL_FUNC constexpr To as_type(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}

template <class T, class U>
constexpr bool is_same_v = emu::same<T, U>;
template <class T, class U>
struct is_same {
  static constexpr bool value = emu::same<T, U>;
};
template <bool Condition, class T = void>
using enable_if_t = emu::enable_if<Condition, T>;
template <bool Condition, class T = void>
struct enable_if : emu::EnableIf<Condition, T> {};
template <class T>
using remove_cv_t = emu::bare<T>;
template <class T>
using remove_addrspace_t = T;
template <bool Condition, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool Condition, class T, class F>
using conditional_t = typename conditional<Condition, T, F>::type;
// Equal in all threads, which only Metal's compiler wants to know.
template <class T>
using uniform = T;
template <class T>
METAL_FUNC constexpr T make_uniform(T value) {
  return value;
}

template <class T, size_t Size>
struct array {
  T elements_[Size];

  METAL_FUNC constexpr T& operator[](size_t i) { return elements_[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return elements_[i]; }
  METAL_FUNC static constexpr size_t size() { return Size; }
};

template <class T, T Value>
struct integral_constant {
  static constexpr T value = Value;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return Value; }
};
template <bool Value>
using bool_constant = integral_constant<bool, Value>;
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <class T>
constexpr bool is_floating_point_v =
    emu::same<emu::bare<T>, float> || emu::same<emu::bare<T>, half> ||
    emu::same<emu::bare<T>, bfloat>;
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <class T>
struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <class T>
constexpr bool is_signed_v =
    is_floating_point_v<T> || (__is_integral(T) && __is_signed(T));
template <class T>
constexpr bool is_unsigned_v = __is_integral(T) && __is_unsigned(T);

}  // namespace metal
