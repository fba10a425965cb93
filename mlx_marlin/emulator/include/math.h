// metal_math, metal_integer, metal_relational, metal_geometric. Elementary functions come
// from the C library in float; half and bfloat results are rounded once.
#pragma once
#include "types.h"

extern "C" {
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float log10f(float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float powf(float, float);
float fmodf(float, float);
float ldexpf(float, int);
float frexpf(float, int*);
}

namespace emu {

template <class T>
constexpr bool is_float = metal::is_floating_point_v<T>;

// The type in which two operands meet: a vector if one of them is.
template <class A, class B>
struct Common {
  using type = decltype(A() + B());
};
template <class A>
struct Common<A, A> {
  using type = A;
};
template <class A, class B>
using common = typename Common<bare<A>, bare<B>>::type;

// x + y, both exact, rounded once to a type of at most 11 bits: the float sum is first
// rounded to odd, which a second rounding cannot hurt.
template <class T>
METAL_FUNC T round_sum(float x, float y) {
  float sum = x + y;
  float part = sum - x;
  float lost = (x - (sum - part)) + (y - part);
  int bits = __builtin_bit_cast(int, sum);
  if (lost != 0 && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return T(__builtin_bit_cast(float, bits));
}

// Calls `function` on every element.
template <class Function, class T, class... Rest>
METAL_FUNC auto each(Function function, const T& first, const Rest&... rest) {
  if constexpr (is_vector<T>) {
    using Element = decltype(function(element_of<T>(first[0]), element_of<Rest>(rest[0])...));
    metal::vec<Element, size_of<T>> result;
    for (int i = 0; i < size_of<T>; ++i)
      result[i] = function(element_of<T>(first[i]), element_of<Rest>(rest[i])...);
    return result;
  } else {
    return function(first, rest...);
  }
}

}  // namespace emu

namespace metal {

// One argument, floating.
#define EMU_UNARY(name, expression)                                    \
  template <class T>                                                   \
  METAL_FUNC auto name(T value) {                                      \
    return emu::each(                                                  \
        [](auto v) __attribute__((always_inline)) {                    \
          using E = decltype(v);                                       \
          if constexpr (emu::is_float<E>) {                            \
            float x = float(v);                                        \
            return E(expression);                                      \
          } else {                                                     \
            float x = float(v);                                        \
            return float(expression);                                  \
          }                                                            \
        },                                                             \
        value);                                                        \
  }

#define EMU_UNARIES                                  \
  EMU_UNARY(exp, ::expf(x))                          \
  EMU_UNARY(exp2, ::exp2f(x))                        \
  EMU_UNARY(exp10, ::powf(10.0f, x))                 \
  EMU_UNARY(log, ::logf(x))                          \
  EMU_UNARY(log2, ::log2f(x))                        \
  EMU_UNARY(log10, ::log10f(x))                      \
  EMU_UNARY(sin, ::sinf(x))                          \
  EMU_UNARY(cos, ::cosf(x))                          \
  EMU_UNARY(tan, ::tanf(x))                          \
  EMU_UNARY(asin, ::asinf(x))                        \
  EMU_UNARY(acos, ::acosf(x))                        \
  EMU_UNARY(atan, ::atanf(x))                        \
  EMU_UNARY(sinh, ::sinhf(x))                        \
  EMU_UNARY(cosh, ::coshf(x))                        \
  EMU_UNARY(tanh, ::tanhf(x))                        \
  EMU_UNARY(asinh, ::asinhf(x))                      \
  EMU_UNARY(acosh, ::acoshf(x))                      \
  EMU_UNARY(atanh, ::atanhf(x))                      \
  EMU_UNARY(sinpi, ::sinf(x * 3.14159265358979f))    \
  EMU_UNARY(cospi, ::cosf(x * 3.14159265358979f))    \
  EMU_UNARY(sqrt, __builtin_elementwise_sqrt(x))     \
  EMU_UNARY(rsqrt, 1.0f / __builtin_elementwise_sqrt(x)) \
  EMU_UNARY(floor, __builtin_elementwise_floor(x))   \
  EMU_UNARY(ceil, __builtin_elementwise_ceil(x))     \
  EMU_UNARY(trunc, __builtin_elementwise_trunc(x))   \
  EMU_UNARY(rint, __builtin_elementwise_rint(x))     \
  EMU_UNARY(round, __builtin_elementwise_round(x))   \
  EMU_UNARY(fract, x - __builtin_elementwise_floor(x)) \
  EMU_UNARY(fabs, __builtin_elementwise_abs(x))      \
  EMU_UNARY(saturate, x > 0 ? (x < 1 ? x : 1) : 0)   \
  EMU_UNARY(sign, x > 0 ? 1 : x < 0 ? -1 : x == 0 ? x : 0)

#define EMU_BINARY(name, expression)                                   \
  template <class A, class B>                                          \
  METAL_FUNC auto name(A first, B second) {                            \
    using T = emu::common<A, B>;                                       \
    return emu::each(                                                  \
        [](auto v, auto w) __attribute__((always_inline)) {            \
          using E = decltype(v);                                       \
          float x = float(v), y = float(w);                            \
          if constexpr (emu::is_float<E>)                              \
            return E(expression);                                      \
          else                                                         \
            return float(expression);                                  \
        },                                                             \
        emu::make<T>(first), emu::make<T>(second));                    \
  }

#define EMU_BINARIES                 \
  EMU_BINARY(pow, ::powf(x, y))      \
  EMU_BINARY(powr, ::powf(x, y))     \
  EMU_BINARY(atan2, ::atan2f(x, y))  \
  EMU_BINARY(fmod, ::fmodf(x, y))    \
  EMU_BINARY(copysign, __builtin_copysignf(x, y)) \
  EMU_BINARY(fdim, x > y ? x - y : 0) \
  EMU_BINARY(divide, x / y)

EMU_UNARIES
EMU_BINARIES
// Apple's fast variants are less exact; here all three are the same function.
namespace fast {
EMU_UNARIES
EMU_BINARIES
}  // namespace fast
namespace precise {
EMU_UNARIES
EMU_BINARIES
}  // namespace precise

template <class T>
METAL_FUNC T abs(T value) {
  return emu::each(
      [](auto v) __attribute__((always_inline)) {
        using E = decltype(v);
        if constexpr (emu::is_float<E>) return E(__builtin_fabsf(float(v)));
        else return E(v < 0 ? -v : v);
      },
      value);
}

// A NaN loses against a number, as in Metal (fmin and fmax).
#define EMU_EXTREME(name, builtin, comparison)                         \
  template <class A, class B>                                          \
  METAL_FUNC auto name(A first, B second) {                            \
    using T = emu::common<A, B>;                                       \
    return emu::each(                                                  \
        [](auto v, auto w) __attribute__((always_inline)) {            \
          using E = decltype(v);                                       \
          if constexpr (emu::is_float<E>)                              \
            return E(builtin(float(v), float(w)));                     \
          else                                                         \
            return E(v comparison w ? v : w);                          \
        },                                                             \
        emu::make<T>(first), emu::make<T>(second));                    \
  }

#define EMU_EXTREMES                              \
  EMU_EXTREME(min, __builtin_elementwise_minnum, <)  \
  EMU_EXTREME(max, __builtin_elementwise_maxnum, >)  \
  EMU_EXTREME(fmin, __builtin_elementwise_minnum, <) \
  EMU_EXTREME(fmax, __builtin_elementwise_maxnum, >)

EMU_EXTREMES
namespace fast {
EMU_EXTREMES
}
namespace precise {
EMU_EXTREMES
}

template <class T, class L, class H>
METAL_FUNC auto clamp(T value, L low, H high) {
  return min(max(value, low), high);
}
template <class A, class B, class C>
METAL_FUNC auto min3(A a, B b, C c) {
  return min(min(a, b), c);
}
template <class A, class B, class C>
METAL_FUNC auto max3(A a, B b, C c) {
  return max(max(a, b), c);
}

template <class A, class B, class C>
METAL_FUNC auto fma(A a, B b, C c) {
  using T = emu::common<emu::common<A, B>, C>;
  return emu::each(
      [](auto x, auto y, auto z) __attribute__((always_inline)) {
        using E = decltype(x);
        // A product of two halves or bfloats is exact in float.
        if constexpr (emu::same<E, float>) return __builtin_fmaf(x, y, z);
        else return E(emu::round_sum<E>(float(x) * float(y), float(z)));
      },
      emu::make<T>(a), emu::make<T>(b), emu::make<T>(c));
}
template <class A, class B, class C>
METAL_FUNC auto mad(A a, B b, C c) {
  return fma(a, b, c);
}
template <class A, class B, class C>
METAL_FUNC auto mix(A a, B b, C t) {
  return a + (b - a) * t;
}
template <class A, class B>
METAL_FUNC auto step(A edge, B value) {
  using T = emu::common<A, B>;
  return emu::each(
      [](auto e, auto v) __attribute__((always_inline)) {
        return decltype(v)(v < e ? 0 : 1);
      },
      emu::make<T>(edge), emu::make<T>(value));
}

// Relational functions. Metal's answers are bool (vectors); comparisons of vectors give
// integers in clang, so `select`, `any` and `all` take both.
#define EMU_PREDICATE(name, expression)                                \
  template <class T>                                                   \
  METAL_FUNC auto name(T value) {                                      \
    return emu::each(                                                  \
        [](auto v) __attribute__((always_inline)) {                    \
          float x = float(v);                                          \
          return bool(expression);                                     \
        },                                                             \
        value);                                                        \
  }
EMU_PREDICATE(isnan, __builtin_isnan(x))
EMU_PREDICATE(isinf, __builtin_isinf(x))
EMU_PREDICATE(isfinite, __builtin_isfinite(x))
EMU_PREDICATE(signbit, __builtin_signbit(x))
#undef EMU_PREDICATE

template <class T>
METAL_FUNC bool any(T value) {
  if constexpr (emu::is_vector<T>) {
    bool result = false;
    for (int i = 0; i < emu::size_of<T>; ++i) result |= value[i] != 0;
    return result;
  } else {
    return bool(value);
  }
}
template <class T>
METAL_FUNC bool all(T value) {
  if constexpr (emu::is_vector<T>) {
    bool result = true;
    for (int i = 0; i < emu::size_of<T>; ++i) result &= value[i] != 0;
    return result;
  } else {
    return bool(value);
  }
}
template <class A, class B, class C>
METAL_FUNC auto select(A otherwise, B chosen, C condition) {
  using T = emu::common<A, B>;
  if constexpr (emu::is_vector<C>) {
    T a = emu::make<T>(otherwise), b = emu::make<T>(chosen), result;
    for (int i = 0; i < emu::size_of<T>; ++i) result[i] = condition[i] != 0 ? b[i] : a[i];
    return result;
  } else {
    return condition ? emu::make<T>(chosen) : emu::make<T>(otherwise);
  }
}

// Integers.
#define EMU_INTEGER(name, expression)                                  \
  template <class T>                                                   \
  METAL_FUNC T name(T value) {                                         \
    return emu::each(                                                  \
        [](auto v) __attribute__((always_inline)) {                    \
          using E = decltype(v);                                       \
          constexpr int bits = 8 * sizeof(E);                          \
          ulong x = ulong(v) & (~0ul >> (64 - bits));                  \
          return E(expression);                                        \
        },                                                             \
        value);                                                        \
  }
EMU_INTEGER(popcount, __builtin_popcountl(x))
EMU_INTEGER(clz, x ? __builtin_clzl(x) - (64 - bits) : bits)
EMU_INTEGER(ctz, x ? __builtin_ctzl(x) : bits)
EMU_INTEGER(reverse_bits, __builtin_bitreverse64(x) >> (64 - bits))
#undef EMU_INTEGER

METAL_FUNC int mulhi(int a, int b) { return int(long(a) * long(b) >> 32); }
METAL_FUNC uint mulhi(uint a, uint b) { return uint(ulong(a) * ulong(b) >> 32); }
METAL_FUNC int mul24(int a, int b) { return a * b; }
METAL_FUNC uint mul24(uint a, uint b) { return a * b; }
METAL_FUNC int mad24(int a, int b, int c) { return a * b + c; }
METAL_FUNC uint mad24(uint a, uint b, uint c) { return a * b + c; }
METAL_FUNC uint absdiff(int a, int b) { return uint(a > b ? a - b : b - a); }
METAL_FUNC uint absdiff(uint a, uint b) { return a > b ? a - b : b - a; }
template <class T>
METAL_FUNC T rotate(T value, T count) {
  return emu::each(
      [](auto v, auto n) __attribute__((always_inline)) {
        using E = decltype(v);
        constexpr int bits = 8 * sizeof(E);
        ulong x = ulong(v) & (~0ul >> (64 - bits));
        int by = int(n) & (bits - 1);
        return E(by ? x << by | x >> (bits - by) : x);
      },
      value, count);
}
template <class T>
METAL_FUNC T extract_bits(T value, uint offset, uint bits) {
  constexpr uint width = 8 * sizeof(T);
  if (bits == 0) return 0;
  return T(T(value << (width - bits - offset)) >> (width - bits));
}
template <class T>
METAL_FUNC T insert_bits(T base, T insert, uint offset, uint bits) {
  if (bits == 0) return base;
  ulong mask = (~0ul >> (64 - bits)) << offset;
  return T((ulong(base) & ~mask) | (ulong(insert) << offset & mask));
}
template <class T>
METAL_FUNC T ldexp(T value, int exponent) {
  return T(::ldexpf(float(value), exponent));
}
template <class T>
METAL_FUNC T frexp(T value, int& exponent) {
  return T(::frexpf(float(value), &exponent));
}
template <class T>
METAL_FUNC T modf(T value, T& whole) {
  whole = trunc(value);
  return value - whole;
}
template <class T>
METAL_FUNC T nextafter(T from, T to) {
  if (from == to || isnan(from) || isnan(to)) return from == to ? to : from + to;
  using Bits = conditional_t<sizeof(T) == 4, int, short>;
  Bits bits = __builtin_bit_cast(Bits, from);
  if (from == T(0)) bits = Bits(1) | (to < T(0) ? Bits(Bits(1) << (8 * sizeof(T) - 1)) : 0);
  else bits += (from < to) == (from > T(0)) ? 1 : -1;
  return __builtin_bit_cast(T, bits);
}

// Geometry.
template <class T>
METAL_FUNC auto dot(T a, T b) {
  auto sum = a[0] * b[0];
  for (int i = 1; i < emu::size_of<T>; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T>
METAL_FUNC auto length_squared(T v) {
  return dot(v, v);
}
template <class T>
METAL_FUNC auto length(T v) {
  return sqrt(dot(v, v));
}
template <class T>
METAL_FUNC auto distance(T a, T b) {
  return length(a - b);
}
template <class T>
METAL_FUNC T normalize(T v) {
  return v * rsqrt(dot(v, v));
}
template <class T>
METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

#undef EMU_UNARY
#undef EMU_UNARIES
#undef EMU_BINARY
#undef EMU_BINARIES
#undef EMU_EXTREME
#undef EMU_EXTREMES

}  // namespace metal

#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_PI_H half(M_PI_F)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define CHAR_BIT 8

namespace metal {

template <class T>
struct numeric_limits;

#define EMU_FLOAT_LIMITS(type, largest, smallest, step, mantissa)             \
  template <>                                                                 \
  struct numeric_limits<type> {                                               \
    static constexpr bool is_integer = false, is_signed = true;               \
    static constexpr int digits = mantissa;                                   \
    static constexpr type max() { return type(largest); }                     \
    static constexpr type lowest() { return type(-(largest)); }               \
    static constexpr type min() { return type(smallest); }                    \
    static constexpr type epsilon() { return type(step); }                    \
    static constexpr type infinity() { return type(__builtin_inff()); }       \
    static constexpr type quiet_NaN() { return type(__builtin_nanf("")); }    \
  };
EMU_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, 24)
EMU_FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f, 11)
EMU_FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 8)
#undef EMU_FLOAT_LIMITS

#define EMU_INTEGER_LIMITS(type)                                                   \
  template <>                                                                      \
  struct numeric_limits<type> {                                                    \
    static constexpr bool is_integer = true, is_signed = type(-1) < type(0);       \
    static constexpr int digits = 8 * sizeof(type) - is_signed;                    \
    static constexpr type max() {                                                  \
      return type(~0ul >> (64 - 8 * sizeof(type) + is_signed));                    \
    }                                                                              \
    static constexpr type lowest() { return is_signed ? type(-max() - 1) : 0; }    \
    static constexpr type min() { return lowest(); }                               \
    static constexpr type infinity() { return max(); }                             \
  };
EMU_INTEGER_LIMITS(char)
EMU_INTEGER_LIMITS(int8_t)
EMU_INTEGER_LIMITS(uchar)
EMU_INTEGER_LIMITS(short)
EMU_INTEGER_LIMITS(ushort)
EMU_INTEGER_LIMITS(int)
EMU_INTEGER_LIMITS(uint)
EMU_INTEGER_LIMITS(long)
EMU_INTEGER_LIMITS(ulong)
#undef EMU_INTEGER_LIMITS

template <>
struct numeric_limits<bool> {
  static constexpr bool is_integer = true, is_signed = false;
  static constexpr int digits = 1;
  static constexpr bool max() { return true; }
  static constexpr bool lowest() { return false; }
  static constexpr bool min() { return false; }
};

}  // namespace metal
