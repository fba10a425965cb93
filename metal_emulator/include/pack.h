// metal_pack: normalized integers packed into 16 or 32 bits, first component lowest.
#pragma once
#include "math.h"

namespace emu {

// The bits of every component, in order.
template <uint... Bits>
struct Fields {
  static constexpr uint bits[] = {Bits...};
  static constexpr int count = sizeof...(Bits);

  METAL_FUNC static uint mask(int at) { return (1u << bits[at]) - 1; }
};
using Bytes = Fields<8, 8, 8, 8>;
using Shorts = Fields<16, 16>;
using Rgb10a2 = Fields<10, 10, 10, 2>;
using Rgb565 = Fields<5, 6, 5>;

template <class F, class T>
METAL_FUNC auto unpack_unorm(uint packed) {
  metal::vec<T, F::count> result(0);
  for (int i = 0; i < F::count; packed >>= F::bits[i++])
    result[i] = T(float(packed & F::mask(i)) / float(F::mask(i)));
  return result;
}
template <class F, class T>
METAL_FUNC auto unpack_snorm(uint packed) {
  metal::vec<T, F::count> result(0);
  for (int i = 0; i < F::count; packed >>= F::bits[i++]) {
    int value = int(packed << (32 - F::bits[i])) >> (32 - F::bits[i]);
    result[i] = T(metal::max(float(value) / float(F::mask(i) >> 1), -1.0f));
  }
  return result;
}
// A component of NaN becomes the lowest value.
template <class F, class T>
METAL_FUNC uint pack_unorm(metal::vec<T, F::count> value) {
  uint result = 0;
  for (int i = 0, at = 0; i < F::count; at += F::bits[i++]) {
    float scaled = metal::saturate(float(value[i])) * float(F::mask(i));
    result |= uint(metal::rint(scaled)) << at;
  }
  return result;
}
template <class F, class T>
METAL_FUNC uint pack_snorm(metal::vec<T, F::count> value) {
  uint result = 0;
  for (int i = 0, at = 0; i < F::count; at += F::bits[i++]) {
    float scaled = metal::clamp(float(value[i]), -1.0f, 1.0f) * float(F::mask(i) >> 1);
    result |= (uint(int(metal::rint(scaled))) & F::mask(i)) << at;
  }
  return result;
}

METAL_FUNC float linear_of(float srgb) {
  return srgb <= 0.04045f ? srgb / 12.92f : ::powf((srgb + 0.055f) / 1.055f, 2.4f);
}
METAL_FUNC float srgb_of(float value) {
  float linear = metal::saturate(value);
  return linear < 0.0031308f ? 12.92f * linear
                             : 1.055f * ::powf(linear, 1.0f / 2.4f) - 0.055f;
}

// Alpha is linear.
template <class T>
METAL_FUNC metal::vec<T, 4> unpack_srgb(uint packed) {
  auto v = unpack_unorm<Bytes, float>(packed);
  return make<metal::vec<T, 4>>(linear_of(v.x), linear_of(v.y), linear_of(v.z), v.w);
}
template <class T>
METAL_FUNC uint pack_srgb(metal::vec<T, 4> value) {
  auto v = make<metal::vec<float, 4>>(value);
  return pack_unorm<Bytes, float>(
      make<metal::vec<float, 4>>(srgb_of(v.x), srgb_of(v.y), srgb_of(v.z), v.w));
}

}  // namespace emu

namespace metal {

// Templates over the element type: the compiler looks only into those that are used.
#define EMU_FORMAT(type, size, name, packed, kind, fields)           \
  template <class T = type>                                          \
  METAL_FUNC vec<T, size> unpack_##name##_to_##type(packed bits) {   \
    return emu::unpack_##kind<emu::fields, T>(bits);                 \
  }                                                                  \
  template <class T = type>                                          \
  METAL_FUNC packed pack_##type##_to_##name(vec<type, size> value) { \
    return packed(emu::pack_##kind<emu::fields, T>(value));          \
  }
#define EMU_FORMATS(type)                                              \
  EMU_FORMAT(type, 4, unorm4x8, uint, unorm, Bytes)                    \
  EMU_FORMAT(type, 4, snorm4x8, uint, snorm, Bytes)                    \
  EMU_FORMAT(type, 2, unorm2x16, uint, unorm, Shorts)                  \
  EMU_FORMAT(type, 2, snorm2x16, uint, snorm, Shorts)                  \
  EMU_FORMAT(type, 4, unorm10a2, uint, unorm, Rgb10a2)                 \
  EMU_FORMAT(type, 3, unorm565, ushort, unorm, Rgb565)                 \
  template <class T = type>                                            \
  METAL_FUNC vec<T, 4> unpack_unorm4x8_srgb_to_##type(uint bits) {     \
    return emu::unpack_srgb<T>(bits);                                  \
  }                                                                    \
  template <class T = type>                                            \
  METAL_FUNC uint pack_##type##_to_srgb_unorm4x8(vec<type, 4> value) { \
    return emu::pack_srgb<T>(value);                                   \
  }
EMU_FORMATS(float)
EMU_FORMATS(half)
#undef EMU_FORMATS
#undef EMU_FORMAT

}  // namespace metal
