// metal_math, metal_integer, metal_relational, metal_geometric and metal_limits. Most
// are overloads for every type, as in Metal, and no templates: `min(1u, 1)` or
// `max(1.0h, 1.0f)` is ambiguous there, and must be so here.
#pragma once
#include "../constants.h"
#include "types.h"

#define EMU_EACH_VECTOR(M, type) \
  M(type##2, type)               \
  M(type##3, type)               \
  M(type##4, type)
#define EMU_EACH_WIDTH(M, type) \
  M(type, type)                 \
  EMU_EACH_VECTOR(M, type)
#define EMU_EACH_INTEGER(M) \
  EMU_EACH_WIDTH(M, char)   \
  EMU_EACH_WIDTH(M, uchar)  \
  EMU_EACH_WIDTH(M, short)  \
  EMU_EACH_WIDTH(M, ushort) \
  EMU_EACH_WIDTH(M, int)    \
  EMU_EACH_WIDTH(M, uint)   \
  EMU_EACH_WIDTH(M, long)   \
  EMU_EACH_WIDTH(M, ulong)
// bfloat has functions of scalars only, and those come from MLX.
#define EMU_EACH_FLOAT(M)  \
  EMU_EACH_WIDTH(M, half)  \
  EMU_EACH_WIDTH(M, float) \
  M(bfloat, bfloat)

namespace metal {

#define EMU_FLOAT_FUNCTIONS(T, E) \
  T acos(T);                      \
  T acosh(T);                     \
  T asin(T);                      \
  T asinh(T);                     \
  T atan(T);                      \
  T atanh(T);                     \
  T ceil(T);                      \
  T cos(T);                       \
  T cosh(T);                      \
  T cospi(T);                     \
  T exp(T);                       \
  T exp10(T);                     \
  T exp2(T);                      \
  T fabs(T);                      \
  T abs(T);                       \
  T floor(T);                     \
  T fract(T);                     \
  T log(T);                       \
  T log10(T);                     \
  T log2(T);                      \
  T rint(T);                      \
  T round(T);                     \
  T rsqrt(T);                     \
  T saturate(T);                  \
  T sign(T);                      \
  T sin(T);                       \
  T sinh(T);                      \
  T sinpi(T);                     \
  T sqrt(T);                      \
  T tan(T);                       \
  T tanh(T);                      \
  T tanpi(T);                     \
  T trunc(T);                     \
  T atan2(T, T);                  \
  T copysign(T, T);               \
  T divide(T, T);                 \
  T fdim(T, T);                   \
  T fmax(T, T);                   \
  T fmin(T, T);                   \
  T fmod(T, T);                   \
  T max(T, T);                    \
  T min(T, T);                    \
  T nextafter(T, T);              \
  T pow(T, T);                    \
  T powr(T, T);                   \
  T step(T, T);                   \
  T clamp(T, T, T);               \
  T fma(T, T, T);                 \
  T fmax3(T, T, T);               \
  T fmedian3(T, T, T);            \
  T fmin3(T, T, T);               \
  T max3(T, T, T);                \
  T median3(T, T, T);             \
  T min3(T, T, T);                \
  T mix(T, T, T);                 \
  T smoothstep(T, T, T);          \
  T modf(T, thread T&);           \
  T sincos(T, thread T&);
EMU_EACH_FLOAT(EMU_FLOAT_FUNCTIONS)
namespace fast {
EMU_EACH_WIDTH(EMU_FLOAT_FUNCTIONS, float)
EMU_FLOAT_FUNCTIONS(bfloat, bfloat)
}  // namespace fast
namespace precise {
EMU_EACH_WIDTH(EMU_FLOAT_FUNCTIONS, float)
EMU_FLOAT_FUNCTIONS(bfloat, bfloat)
}  // namespace precise
#undef EMU_FLOAT_FUNCTIONS

#define EMU_SCALAR_FUNCTIONS(T) \
  int ilogb(T);                 \
  bool isordered(T, T);         \
  bool isunordered(T, T);       \
  T ldexp(T, int);              \
  T frexp(T, thread int&);      \
  bool isfinite(T);             \
  bool isinf(T);                \
  bool isnan(T);                \
  bool isnormal(T);             \
  bool signbit(T);
EMU_SCALAR_FUNCTIONS(half)
EMU_SCALAR_FUNCTIONS(float)
EMU_SCALAR_FUNCTIONS(bfloat)
#undef EMU_SCALAR_FUNCTIONS

#define EMU_VECTOR_FUNCTIONS(T, E)               \
  E dot(T, T);                                   \
  E distance(T, T);                              \
  E distance_squared(T, T);                      \
  E length(T);                                   \
  E length_squared(T);                           \
  T normalize(T);                                \
  T faceforward(T, T, T);                        \
  T reflect(T, T);                               \
  T refract(T, T, E);                            \
  T smoothstep(E, E, T);                         \
  vec<int, emu::size_of<T>> ilogb(T);            \
  vec<uchar, emu::size_of<T>> isordered(T, T);   \
  vec<uchar, emu::size_of<T>> isunordered(T, T); \
  T clamp(T, E, E);                              \
  T mix(T, T, E);                                \
  vec<uchar, emu::size_of<T>> isfinite(T);       \
  vec<uchar, emu::size_of<T>> isinf(T);          \
  vec<uchar, emu::size_of<T>> isnan(T);          \
  vec<uchar, emu::size_of<T>> isnormal(T);       \
  vec<uchar, emu::size_of<T>> signbit(T);        \
  T ldexp(T, vec<int, emu::size_of<T>>);         \
  T frexp(T, thread vec<int, emu::size_of<T>>&);
EMU_EACH_VECTOR(EMU_VECTOR_FUNCTIONS, half)
EMU_EACH_VECTOR(EMU_VECTOR_FUNCTIONS, float)
#undef EMU_VECTOR_FUNCTIONS
vec<half, 3> cross(vec<half, 3>, vec<half, 3>);
vec<float, 3> cross(vec<float, 3>, vec<float, 3>);

#define EMU_INTEGER_FUNCTIONS(T, E) \
  T abs(T);                         \
  T clz(T);                         \
  T ctz(T);                         \
  T popcount(T);                    \
  T reverse_bits(T);                \
  T absdiff(T, T);                  \
  T addsat(T, T);                   \
  T hadd(T, T);                     \
  T max(T, T);                      \
  T min(T, T);                      \
  T mulhi(T, T);                    \
  T rhadd(T, T);                    \
  T rotate(T, T);                   \
  T subsat(T, T);                   \
  T clamp(T, T, T);                 \
  T madhi(T, T, T);                 \
  T madsat(T, T, T);                \
  T max3(T, T, T);                  \
  T median3(T, T, T);               \
  T min3(T, T, T);                  \
  T extract_bits(T, uint, uint);    \
  T insert_bits(T, T, uint, uint);
EMU_EACH_INTEGER(EMU_INTEGER_FUNCTIONS)
#undef EMU_INTEGER_FUNCTIONS

#define EMU_24_BITS(T, E) \
  T mul24(T, T);          \
  T mad24(T, T, T);
EMU_EACH_WIDTH(EMU_24_BITS, int)
EMU_EACH_WIDTH(EMU_24_BITS, uint)
#undef EMU_24_BITS

bool all(bool);
bool any(bool);
// Comparisons of vectors give vectors of integers in clang, of bool in Metal.
template <class T, int N>
bool all(vec<T, N>);
template <class T, int N>
bool any(vec<T, N>);
#define EMU_SELECT(T, E) T select(T, T, bool);
EMU_EACH_INTEGER(EMU_SELECT)
EMU_EACH_FLOAT(EMU_SELECT)
#undef EMU_SELECT
template <class T, class B, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<B, N>);

#define EMU_FORMAT(T, size, name, packed)      \
  vec<T, size> unpack_##name##_to_##T(packed); \
  packed pack_##T##_to_##name(vec<T, size>);
#define EMU_FORMATS(T)                         \
  EMU_FORMAT(T, 4, unorm4x8, uint)             \
  EMU_FORMAT(T, 4, snorm4x8, uint)             \
  EMU_FORMAT(T, 2, unorm2x16, uint)            \
  EMU_FORMAT(T, 2, snorm2x16, uint)            \
  EMU_FORMAT(T, 4, unorm10a2, uint)            \
  EMU_FORMAT(T, 3, unorm565, ushort)           \
  vec<T, 4> unpack_unorm4x8_srgb_to_##T(uint); \
  uint pack_##T##_to_srgb_unorm4x8(vec<T, 4>);
EMU_FORMATS(half)
EMU_FORMATS(float)
#undef EMU_FORMATS
#undef EMU_FORMAT

template <class T>
struct numeric_limits;

#define EMU_LIMITS(type, fraction)                                 \
  template <>                                                      \
  struct numeric_limits<type> {                                    \
    static constexpr constant bool is_integer = !fraction;         \
    static constexpr constant bool is_signed = type(-1) < type(0); \
    static constexpr constant int digits = 8 * sizeof(type);       \
    static constexpr type max() { return type(1); }                \
    static constexpr type lowest() { return type(0); }             \
    static constexpr type min() { return type(0); }                \
    static constexpr type epsilon() { return type(0); }            \
    static constexpr type infinity() { return type(1); }           \
    static constexpr type quiet_NaN() { return type(0); }          \
  };
EMU_LIMITS(bool, false)
EMU_LIMITS(char, false)
EMU_LIMITS(int8_t, false)
EMU_LIMITS(uchar, false)
EMU_LIMITS(short, false)
EMU_LIMITS(ushort, false)
EMU_LIMITS(int, false)
EMU_LIMITS(uint, false)
EMU_LIMITS(long, false)
EMU_LIMITS(ulong, false)
EMU_LIMITS(half, true)
EMU_LIMITS(bfloat, true)
EMU_LIMITS(float, true)
#undef EMU_LIMITS

}  // namespace metal
