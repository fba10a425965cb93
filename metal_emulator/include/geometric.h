// metal_geometric, metal_common, and what of metal_math has more than one result.
#pragma once
#include "math.h"

namespace metal {

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
template <class T>
METAL_FUNC auto distance_squared(T a, T b) {
  return length_squared(a - b);
}
template <class T>
METAL_FUNC T faceforward(T n, T incident, T reference) {
  return dot(reference, incident) < 0 ? n : -n;
}
template <class T>
METAL_FUNC T reflect(T incident, T n) {
  return incident - n * (2 * dot(n, incident));
}
template <class T>
METAL_FUNC T refract(T incident, T n, emu::element_of<T> eta) {
  using E = emu::element_of<T>;
  E cosine = dot(n, incident);
  E k = E(1) - eta * eta * (E(1) - cosine * cosine);
  return k < 0 ? T(0) : incident * eta - n * (eta * cosine + sqrt(k));
}

template <class A, class B, class C>
METAL_FUNC auto smoothstep(A low, B high, C value) {
  using T = emu::common<emu::common<A, B>, C>;
  T t = saturate((emu::make<T>(value) - emu::make<T>(low)) /
                 (emu::make<T>(high) - emu::make<T>(low)));
  return T(t * t * (T(3) - T(2) * t));
}

// int for a scalar, a vector of as many integers for a vector.
template <class T>
METAL_FUNC auto ilogb(T value) {
  return emu::each([](auto v) EMU_INLINE { return ::ilogbf(float(v)); }, value);
}
template <class T, class Exponents>
METAL_FUNC T ldexp(T value, Exponents exponents) {
  return emu::each([](auto v, auto e)
                       EMU_INLINE { return decltype(v)(::ldexpf(float(v), int(e))); },
                   value, exponents);
}
template <class T, class Exponents>
METAL_FUNC T frexp(T value, Exponents& exponents) {
  if constexpr (emu::is_vector<T>) {
    T fractions(0);
    for (int i = 0; i < emu::size_of<T>; ++i) {
      int exponent;
      fractions[i] = ::frexpf(float(value[i]), &exponent);
      exponents[i] = exponent;
    }
    return fractions;
  } else {
    return T(::frexpf(float(value), &exponents));
  }
}

#define EMU_PRECISIONS                      \
  template <class T>                        \
  METAL_FUNC T sincos(T value, T& cosine) { \
    cosine = cos(value);                    \
    return sin(value);                      \
  }                                         \
  template <class A, class B, class C>      \
  METAL_FUNC auto fmin3(A a, B b, C c) {    \
    return metal::min3(a, b, c);            \
  }                                         \
  template <class A, class B, class C>      \
  METAL_FUNC auto fmax3(A a, B b, C c) {    \
    return metal::max3(a, b, c);            \
  }                                         \
  template <class A, class B, class C>      \
  METAL_FUNC auto fmedian3(A a, B b, C c) { \
    return metal::median3(a, b, c);         \
  }
EMU_PRECISIONS
namespace fast {
EMU_PRECISIONS
}
namespace precise {
EMU_PRECISIONS
}
#undef EMU_PRECISIONS

}  // namespace metal
