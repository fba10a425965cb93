// metal_limits.
#pragma once
#include "constants.h"
#include "types.h"

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
