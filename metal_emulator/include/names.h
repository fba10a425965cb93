// What both builds declare alike: names of types, type traits, and the values of
// Metal's enumerations. Each build has its own members of the types that are only named
// here.
#pragma once

#ifdef __OPENCL_CPP_VERSION__
#define EMU_CONSTANT constant
#define EMU_ELEMENTS(T, Index, element)                     \
  thread T& operator[](Index) thread;                       \
  device T& operator[](Index) device;                       \
  threadgroup T& operator[](Index) threadgroup;             \
  const thread T& operator[](Index) const thread;           \
  const device T& operator[](Index) const device;           \
  const threadgroup T& operator[](Index) const threadgroup; \
  const constant T& operator[](Index) const constant;
#else
#define EMU_CONSTANT
#define EMU_ELEMENTS(T, Index, element)                           \
  METAL_FUNC constexpr T& operator[](Index i) { return element; } \
  METAL_FUNC constexpr const T& operator[](Index i) const { return element; }
#endif
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
// A vector without the vector's alignment.
template <class T, int N>
struct packed_vec;
template <class T, int Columns, int Rows>
struct matrix;
template <class T, int Columns, int Rows>
struct simdgroup_matrix;
template <class T>
struct atomic;

template <class T, class U>
constexpr EMU_CONSTANT bool is_same_v = false;
template <class T>
constexpr EMU_CONSTANT bool is_same_v<T, T> = true;

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
  static constexpr EMU_CONSTANT T value = Value;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return Value; }
};
template <bool Value>
using bool_constant = integral_constant<bool, Value>;
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

// Without const, volatile and address space.
template <class T>
struct remove_cv {
  using type = T;
};
#define EMU_REMOVE(qualifiers) \
  template <class T>           \
  struct remove_cv<qualifiers T> : remove_cv<T> {};
EMU_REMOVE(const)
#ifdef __OPENCL_CPP_VERSION__
EMU_REMOVE(device)
EMU_REMOVE(threadgroup)
EMU_REMOVE(thread)
EMU_REMOVE(const device)
EMU_REMOVE(const threadgroup)
EMU_REMOVE(constant)
EMU_REMOVE(const thread)
#else
EMU_REMOVE(volatile)
EMU_REMOVE(const volatile)
#endif
#undef EMU_REMOVE
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T, class U>
struct is_same : integral_constant<bool, is_same_v<T, U>> {};
template <class T>
constexpr EMU_CONSTANT bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <class T>
constexpr EMU_CONSTANT bool is_integral_v = __is_integral(remove_cv_t<T>);
template <class T>
constexpr EMU_CONSTANT bool is_arithmetic_v =
    is_floating_point_v<T> || is_integral_v<T>;
template <class T>
constexpr EMU_CONSTANT bool is_signed_v =
    is_floating_point_v<T> || (is_integral_v<T> && __is_signed(remove_cv_t<T>));
template <class T>
constexpr EMU_CONSTANT bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
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

  EMU_ELEMENTS(T, size_t, elements_[i]) METAL_FUNC static constexpr size_t size() {
    return Size;
  }
};

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
enum memory_order : uint {
  memory_order_relaxed = 0,
  memory_order_acquire = 2,
  memory_order_release = 3,
  memory_order_acq_rel = 4,
  memory_order_seq_cst = 5,
};
enum thread_scope : uint {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

}  // namespace metal

namespace emu {

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
  static constexpr EMU_CONSTANT int size = 0;
};
template <class T, int N>
struct Shape<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr EMU_CONSTANT int size = N;
};
template <class T, int N>
struct Shape<metal::packed_vec<T, N>> {
  using element = T;
  static constexpr EMU_CONSTANT int size = N;
};

}  // namespace emu

// Metal has these names in its namespace too.
#define EMU_VECTORS(type)                                           \
  using type##2 = metal::vec<type, 2>;                              \
  using type##3 = metal::vec<type, 3>;                              \
  using type##4 = metal::vec<type, 4>;                              \
  using packed_##type##2 = metal::packed_vec<type, 2>;              \
  using packed_##type##3 = metal::packed_vec<type, 3>;              \
  using packed_##type##4 = metal::packed_vec<type, 4>;              \
  namespace metal {                                                 \
  using ::type##2, ::type##3, ::type##4;                            \
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

namespace metal {

using ::int8_t, ::int16_t, ::int32_t, ::int64_t;
using ::size_t, ::ptrdiff_t, ::uintptr_t, ::intptr_t;
using ::uchar, ::ushort, ::uint, ::ulong, ::bfloat;
using ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t;

template <class To, class From>
METAL_FUNC constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}

using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

#define EMU_MATRICES(type)              \
  using type##2x2 = matrix<type, 2, 2>; \
  using type##2x3 = matrix<type, 2, 3>; \
  using type##2x4 = matrix<type, 2, 4>; \
  using type##3x2 = matrix<type, 3, 2>; \
  using type##3x3 = matrix<type, 3, 3>; \
  using type##3x4 = matrix<type, 3, 4>; \
  using type##4x2 = matrix<type, 4, 2>; \
  using type##4x3 = matrix<type, 4, 3>; \
  using type##4x4 = matrix<type, 4, 4>;
EMU_MATRICES(half)
EMU_MATRICES(float)
#undef EMU_MATRICES

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal

using bfloat16_t = bfloat;
using float16_t = half;
template <bool Condition, class T, class F>
struct ConditionalType : metal::conditional<Condition, T, F> {};
