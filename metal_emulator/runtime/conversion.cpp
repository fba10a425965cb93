// The conversion that processors without bfloat instructions ask a library for.
#include "runtime.h"

// Round to nearest, ties to even; a NaN stays one.
extern "C" MSLEMU_EXPORT __bf16 __truncsfbf2(float value) {
  emu::u32 bits = __builtin_bit_cast(emu::u32, value);
  emu::u32 rounded = bits + 0x7FFF + (bits >> 16 & 1);
  bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  auto result = static_cast<unsigned short>((is_nan ? bits | 0x400000 : rounded) >> 16);
  return __builtin_bit_cast(__bf16, result);
}
