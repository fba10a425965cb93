// metal_math and metal_geometric. Elementary functions come from the C library in
// float; half and bfloat results are rounded once.
#pragma once
#include "integer.h"
#include "limits.h"

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
int ilogbf(float);
}

namespace emu {

// x + y, both exact, rounded once to a type of at most 11 bits: the float sum is first
// rounded to odd, which a second rounding cannot hurt.
template <class T>
METAL_FUNC T round_sum(float x, float y) {
  float sum = x + y;
  float part = sum - x;
  float lost = (x - (sum - part)) + (y - part);
  int bits = __builtin_bit_cast(int, sum);
  bool inexact = lost < 0 || lost > 0;  // neither for infinities and NaN
  if (inexact && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return T(__builtin_bit_cast(float, bits));
}

// sin of pi times x, some quarters of a circle further. Their number is exact.
METAL_FUNC float sin_of_quarters(float x, float quarters) {
  float nearest = __builtin_elementwise_rint(2.0f * x);
  float angle = (x - 0.5f * nearest) * 3.14159265358979f;
  nearest += quarters;
  float quarter = nearest - 4.0f * __builtin_elementwise_floor(0.25f * nearest);
  if (quarter == 0.0f) return ::sinf(angle);
  if (quarter == 1.0f) return ::cosf(angle);
  return quarter == 2.0f ? -::sinf(angle) : -::cosf(angle);
}
METAL_FUNC float sin_pi(float x) { return sin_of_quarters(x, 0.0f); }
METAL_FUNC float cos_pi(float x) { return sin_of_quarters(x, 1.0f); }

}  // namespace emu

namespace metal {

// One argument. Integers give a float.
#define EMU_UNARY(name, expression)                      \
  template <class T>                                     \
  METAL_FUNC auto name(T value) {                        \
    return emu::each(                                    \
        [](auto v) EMU_INLINE {                          \
          float x = float(v);                            \
          return emu::floating<decltype(v)>(expression); \
        },                                               \
        value);                                          \
  }

#define EMU_UNARIES                                      \
  EMU_UNARY(exp, ::expf(x))                              \
  EMU_UNARY(exp2, ::exp2f(x))                            \
  EMU_UNARY(exp10, ::powf(10.0f, x))                     \
  EMU_UNARY(log, ::logf(x))                              \
  EMU_UNARY(log2, ::log2f(x))                            \
  EMU_UNARY(log10, ::log10f(x))                          \
  EMU_UNARY(sin, ::sinf(x))                              \
  EMU_UNARY(cos, ::cosf(x))                              \
  EMU_UNARY(tan, ::tanf(x))                              \
  EMU_UNARY(asin, ::asinf(x))                            \
  EMU_UNARY(acos, ::acosf(x))                            \
  EMU_UNARY(atan, ::atanf(x))                            \
  EMU_UNARY(sinh, ::sinhf(x))                            \
  EMU_UNARY(cosh, ::coshf(x))                            \
  EMU_UNARY(tanh, ::tanhf(x))                            \
  EMU_UNARY(asinh, ::asinhf(x))                          \
  EMU_UNARY(acosh, ::acoshf(x))                          \
  EMU_UNARY(atanh, ::atanhf(x))                          \
  EMU_UNARY(sinpi, emu::sin_pi(x))                       \
  EMU_UNARY(cospi, emu::cos_pi(x))                       \
  EMU_UNARY(tanpi, emu::sin_pi(x) / emu::cos_pi(x))      \
  EMU_UNARY(sqrt, __builtin_elementwise_sqrt(x))         \
  EMU_UNARY(rsqrt, 1.0f / __builtin_elementwise_sqrt(x)) \
  EMU_UNARY(floor, __builtin_elementwise_floor(x))       \
  EMU_UNARY(ceil, __builtin_elementwise_ceil(x))         \
  EMU_UNARY(trunc, __builtin_elementwise_trunc(x))       \
  EMU_UNARY(rint, __builtin_elementwise_rint(x))         \
  EMU_UNARY(round, __builtin_elementwise_round(x))       \
  EMU_UNARY(fract, x - __builtin_elementwise_floor(x))   \
  EMU_UNARY(fabs, __builtin_elementwise_abs(x))          \
  EMU_UNARY(saturate, x > 0 ? (x < 1 ? x : 1) : 0)       \
  EMU_UNARY(sign, x > 0 ? 1 : x < 0 ? -1 : x == 0 ? x : 0)

#define EMU_BINARY(name, expression)                     \
  template <class A, class B>                            \
  METAL_FUNC auto name(A first, B second) {              \
    using T = emu::common<A, B>;                         \
    return emu::each(                                    \
        [](auto v, auto w) EMU_INLINE {                  \
          float x = float(v), y = float(w);              \
          return emu::floating<decltype(v)>(expression); \
        },                                               \
        emu::make<T>(first), emu::make<T>(second));      \
  }

#define EMU_BINARIES                              \
  EMU_BINARY(pow, ::powf(x, y))                   \
  EMU_BINARY(powr, ::powf(x, y))                  \
  EMU_BINARY(atan2, ::atan2f(x, y))               \
  EMU_BINARY(fmod, ::fmodf(x, y))                 \
  EMU_BINARY(copysign, __builtin_copysignf(x, y)) \
  EMU_BINARY(fdim, x > y ? x - y : 0)             \
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
      [](auto v) EMU_INLINE {
        using E = decltype(v);
        if constexpr (emu::is_float<E>)
          return E(__builtin_fabsf(float(v)));
        else
          return E(v < 0 ? -v : v);
      },
      value);
}

// Clang 19 has no element-wise minNum. These are the same intrinsics.
#if __has_builtin(__builtin_elementwise_minnum)
#define EMU_MINNUM __builtin_elementwise_minnum
#define EMU_MAXNUM __builtin_elementwise_maxnum
#else
#define EMU_MINNUM __builtin_fminf
#define EMU_MAXNUM __builtin_fmaxf
#endif

// A NaN loses against a number, as in Metal (fmin and fmax).
#define EMU_EXTREME(name, builtin, comparison)      \
  template <class A, class B>                       \
  METAL_FUNC auto name(A first, B second) {         \
    using T = emu::common<A, B>;                    \
    return emu::each(                               \
        [](auto v, auto w) EMU_INLINE {             \
          using E = decltype(v);                    \
          if constexpr (emu::is_float<E>)           \
            return E(builtin(float(v), float(w)));  \
          else                                      \
            return E(v comparison w ? v : w);       \
        },                                          \
        emu::make<T>(first), emu::make<T>(second)); \
  }

#define EMU_EXTREMES               \
  EMU_EXTREME(min, EMU_MINNUM, <)  \
  EMU_EXTREME(max, EMU_MAXNUM, >)  \
  EMU_EXTREME(fmin, EMU_MINNUM, <) \
  EMU_EXTREME(fmax, EMU_MAXNUM, >)

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
METAL_FUNC auto median3(A a, B b, C c) {
  return max(min(a, b), min(max(a, b), c));
}

template <class A, class B, class C>
METAL_FUNC auto fma(A a, B b, C c) {
  using T = emu::common<emu::common<A, B>, C>;
  return emu::each(
      [](auto x, auto y, auto z) EMU_INLINE {
        using E = decltype(x);
        // A product of two halves or bfloats is exact in float.
        if constexpr (metal::is_same_v<E, float>)
          return __builtin_fmaf(x, y, z);
        else
          return E(emu::round_sum<E>(float(x) * float(y), float(z)));
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
  return emu::each([](auto e, auto v) EMU_INLINE { return decltype(v)(v < e ? 0 : 1); },
                   emu::make<T>(edge), emu::make<T>(value));
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
  if (from == T(0))
    bits = Bits(1) | (to < T(0) ? Bits(Bits(1) << (8 * sizeof(T) - 1)) : 0);
  else
    bits += (from < to) == (from > T(0)) ? 1 : -1;
  return __builtin_bit_cast(T, bits);
}

#undef EMU_UNARY
#undef EMU_UNARIES
#undef EMU_BINARY
#undef EMU_BINARIES
#undef EMU_EXTREME
#undef EMU_EXTREMES
#undef EMU_MINNUM
#undef EMU_MAXNUM

}  // namespace metal
