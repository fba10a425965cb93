// Scalars, vectors, packed vectors, conversions and type traits, with address spaces.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
// Functions may be template arguments.
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define device __global
#define threadgroup __local
#define constant const __constant
#define thread __private
#define METAL_FUNC inline __attribute__((always_inline))

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
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

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, class U>
constexpr constant bool is_same_v = false;
template <class T>
constexpr constant bool is_same_v<T, T> = true;

template <bool Condition, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool Condition, class T = void>
using enable_if_t = typename enable_if<Condition, T>::type;

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

template <class T, T Value>
struct integral_constant {
  static constexpr constant T value = Value;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return Value; }
};
template <bool Value>
using bool_constant = integral_constant<bool, Value>;
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

// Without const, volatile, reference and address space.
template <class T>
struct remove_cv {
  using type = T;
};
#define EMU_REMOVE(qualifiers) \
  template <class T>           \
  struct remove_cv<qualifiers T> : remove_cv<T> {};
EMU_REMOVE(const)
EMU_REMOVE(device)
EMU_REMOVE(threadgroup)
EMU_REMOVE(thread)
EMU_REMOVE(const device)
EMU_REMOVE(const threadgroup)
EMU_REMOVE(constant)
EMU_REMOVE(const thread)
#undef EMU_REMOVE
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
using remove_addrspace_t = remove_cv_t<T>;

template <class T, class U>
struct is_same : integral_constant<bool, is_same_v<T, U>> {};
template <class T>
constexpr constant bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <class T>
constexpr constant bool is_integral_v = __is_integral(remove_cv_t<T>);
template <class T>
constexpr constant bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <class T>
constexpr constant bool is_signed_v =
    is_floating_point_v<T> || (is_integral_v<T> && __is_signed(remove_cv_t<T>));
template <class T>
constexpr constant bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <class T>
struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <class T>
struct is_arithmetic : integral_constant<bool, is_arithmetic_v<T>> {};
template <class T>
struct is_signed : integral_constant<bool, is_signed_v<T>> {};
template <class T>
struct is_unsigned : integral_constant<bool, is_unsigned_v<T>> {};

// Equal in all threads: no more than a hint.
template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T value) {
  return value;
}

template <class T, size_t N>
struct array {
  T elements[N];
  thread T& operator[](size_t) thread;
  device T& operator[](size_t) device;
  threadgroup T& operator[](size_t) threadgroup;
  const thread T& operator[](size_t) const thread;
  const device T& operator[](size_t) const device;
  const threadgroup T& operator[](size_t) const threadgroup;
  const constant T& operator[](size_t) const constant;
  static constexpr size_t size() { return N; }
};

template <class T, int N>
struct packed_vec;

#define EMU_PACKED(size, ...)                               \
  template <class T>                                        \
  struct packed_vec<T, size> {                              \
    T __VA_ARGS__;                                          \
    packed_vec() = default;                                 \
    constexpr packed_vec(vec<T, size>) {}                   \
    operator vec<T, size>() const;                          \
    operator vec<T, size>() const constant;                 \
    thread T& operator[](int) thread;                       \
    device T& operator[](int) device;                       \
    threadgroup T& operator[](int) threadgroup;             \
    const thread T& operator[](int) const thread;           \
    const device T& operator[](int) const device;           \
    const threadgroup T& operator[](int) const threadgroup; \
    const constant T& operator[](int) const constant;       \
  };
EMU_PACKED(2, x, y)
EMU_PACKED(3, x, y, z)
EMU_PACKED(4, x, y, z, w)
#undef EMU_PACKED

}  // namespace metal

namespace emu {

// Element type and length of a vector; length 0 means "not a vector".
template <class T>
struct Shape {
  using element = T;
  static constexpr constant int size = 0;
};
template <class T, int N>
struct Shape<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr constant int size = N;
};
template <class T, int N>
struct Shape<metal::packed_vec<T, N>> {
  using element = T;
  static constexpr constant int size = N;
};
template <class T>
constexpr constant int size_of = Shape<T>::size;
template <class T>
constexpr constant int elements_of = Shape<T>::size ? Shape<T>::size : 1;
template <class T>
using element_of = typename Shape<T>::element;

// A parameter's type that takes no part in deduction.
template <class T>
struct Given {
  using type = T;
};
template <class T>
using given = typename Given<T>::type;

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
// Clang has no vectors of bool in this mode.
using bool2 = uchar2;
using bool3 = uchar3;
using bool4 = uchar4;

namespace metal {

using ::uchar, ::ushort, ::uint, ::ulong, ::bfloat;
using ::int8_t, ::int16_t, ::int32_t, ::int64_t;
using ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t;
using ::size_t, ::ptrdiff_t, ::uintptr_t, ::intptr_t;
using ::bool2, ::bool3, ::bool4;

template <class To, class From>
METAL_FUNC constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}

}  // namespace metal
