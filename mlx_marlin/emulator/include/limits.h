// metal_limits, and the constants of metal_math.
#pragma once
#include "types.h"

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

#define EMU_FLOAT_LIMITS(type, largest, smallest, step, mantissa)          \
  template <>                                                              \
  struct numeric_limits<type> {                                            \
    static constexpr bool is_integer = false, is_signed = true;            \
    static constexpr int digits = mantissa;                                \
    static constexpr type max() { return type(largest); }                  \
    static constexpr type lowest() { return type(-(largest)); }            \
    static constexpr type min() { return type(smallest); }                 \
    static constexpr type epsilon() { return type(step); }                 \
    static constexpr type infinity() { return type(__builtin_inff()); }    \
    static constexpr type quiet_NaN() { return type(__builtin_nanf("")); } \
  };
EMU_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, 24)
EMU_FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f, 11)
EMU_FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 8)
#undef EMU_FLOAT_LIMITS

#define EMU_INTEGER_LIMITS(type)                                                \
  template <>                                                                   \
  struct numeric_limits<type> {                                                 \
    static constexpr bool is_integer = true, is_signed = type(-1) < type(0);    \
    static constexpr int digits = 8 * sizeof(type) - is_signed;                 \
    static constexpr type max() {                                               \
      return type(~0ul >> (64 - 8 * sizeof(type) + is_signed));                 \
    }                                                                           \
    static constexpr type lowest() { return is_signed ? type(-max() - 1) : 0; } \
    static constexpr type min() { return lowest(); }                            \
    static constexpr type infinity() { return max(); }                          \
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
