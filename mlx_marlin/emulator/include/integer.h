// metal_integer and metal_relational.
#pragma once
#include "elements.h"

namespace metal {

// Relational functions. Metal's answers are bool (vectors); comparisons of vectors give
// integers in clang, so `select`, `any` and `all` take both.
#define EMU_PREDICATE(name, expression) \
  template <class T>                    \
  METAL_FUNC auto name(T value) {       \
    return emu::each(                   \
        [](auto v) EMU_INLINE {         \
          float x = float(v);           \
          return bool(expression);      \
        },                              \
        value);                         \
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
    for (int i = 0; i < emu::size_of<T>; ++i)
      result[i] = condition[i] != 0 ? b[i] : a[i];
    return result;
  } else {
    return condition ? emu::make<T>(chosen) : emu::make<T>(otherwise);
  }
}

// Integers.
#define EMU_INTEGER(name, expression)                 \
  template <class T>                                  \
  METAL_FUNC T name(T value) {                        \
    return emu::each(                                 \
        [](auto v) EMU_INLINE {                       \
          using E = decltype(v);                      \
          constexpr int bits = 8 * sizeof(E);         \
          ulong x = ulong(v) & (~0ul >> (64 - bits)); \
          return E(expression);                       \
        },                                            \
        value);                                       \
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
      [](auto v, auto n) EMU_INLINE {
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

}  // namespace metal
