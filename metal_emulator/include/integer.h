// metal_integer and metal_relational.
#pragma once
#include "elements.h"
#include "limits.h"

namespace emu {

// Denormals of float are zero, those of half and bfloat are not normal either.
template <class E>
METAL_FUNC bool is_normal(E value) {
  return value == value &&
         E(__builtin_fabsf(float(value))) >= metal::numeric_limits<E>::min() &&
         !__builtin_isinf(float(value));
}

// Twice as many bits and more: the product of two numbers fits.
template <class E>
using Wide = metal::conditional_t<metal::is_signed_v<E>, __int128, unsigned __int128>;

template <class E>
METAL_FUNC E high_product(E a, E b) {
  // 64 bits are enough for the product of two numbers of 32.
  using Product =
      metal::conditional_t<sizeof(E) == 8, Wide<E>,
                           metal::conditional_t<metal::is_signed_v<E>, long, ulong>>;
  return E(Product(a) * Product(b) >> (8 * sizeof(E)));
}
template <class E>
METAL_FUNC E saturated_sum(E a, E b) {
  E sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return b < 0 ? metal::numeric_limits<E>::lowest() : metal::numeric_limits<E>::max();
}
template <class E>
METAL_FUNC E saturated_difference(E a, E b) {
  E difference;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return a < b ? metal::numeric_limits<E>::lowest() : metal::numeric_limits<E>::max();
}
template <class E>
METAL_FUNC E saturated(Wide<E> value) {
  if (value < Wide<E>(metal::numeric_limits<E>::lowest()))
    return metal::numeric_limits<E>::lowest();
  if (value > Wide<E>(metal::numeric_limits<E>::max()))
    return metal::numeric_limits<E>::max();
  return E(value);
}

}  // namespace emu

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
EMU_PREDICATE(isnormal, emu::is_normal(v))
EMU_PREDICATE(signbit, __builtin_signbit(x))
#undef EMU_PREDICATE

template <class T>
METAL_FUNC auto isunordered(T a, emu::given<T> b) {
  return emu::each([](auto x, auto y) EMU_INLINE { return bool(x != x || y != y); }, a,
                   b);
}
template <class T>
METAL_FUNC auto isordered(T a, emu::given<T> b) {
  return emu::each([](auto x, auto y) EMU_INLINE { return bool(x == x && y == y); }, a,
                   b);
}

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

// Functions of several integers of one type.
#define EMU_INTEGERS(name, expression)               \
  template <class T>                                 \
  METAL_FUNC T name(T first, emu::given<T> second) { \
    return emu::each(                                \
        [](auto a, auto b) EMU_INLINE {              \
          using E = decltype(a);                     \
          return E(expression);                      \
        },                                           \
        first, second);                              \
  }
EMU_INTEGERS(absdiff, a > b ? ulong(a) - ulong(b) : ulong(b) - ulong(a))
EMU_INTEGERS(addsat, emu::saturated_sum(a, b))
EMU_INTEGERS(subsat, emu::saturated_difference(a, b))
EMU_INTEGERS(hadd, (a & b) + ((a ^ b) >> 1))
EMU_INTEGERS(rhadd, (a | b) - ((a ^ b) >> 1))
EMU_INTEGERS(mulhi, emu::high_product(a, b))
EMU_INTEGERS(mul24, ulong(a) * ulong(b))
#undef EMU_INTEGERS
#define EMU_INTEGERS(name, expression)                                    \
  template <class T>                                                      \
  METAL_FUNC T name(T first, emu::given<T> second, emu::given<T> third) { \
    return emu::each(                                                     \
        [](auto a, auto b, auto c) EMU_INLINE {                           \
          using E = decltype(a);                                          \
          return E(expression);                                           \
        },                                                                \
        first, second, third);                                            \
  }
EMU_INTEGERS(mad24, ulong(a) * ulong(b) + ulong(c))
EMU_INTEGERS(madhi, ulong(emu::high_product(a, b)) + ulong(c))
EMU_INTEGERS(madsat, emu::saturated<E>(emu::Wide<E>(a) * b + c))
#undef EMU_INTEGERS
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
  return emu::each(
      [=](auto v) EMU_INLINE {
        using E = decltype(v);
        constexpr uint width = 8 * sizeof(E);
        if (bits == 0) return E(0);
        return E(E(v << (width - bits - offset)) >> (width - bits));
      },
      value);
}
template <class T>
METAL_FUNC T insert_bits(T base, emu::given<T> insert, uint offset, uint bits) {
  if (bits == 0) return base;
  ulong mask = (~0ul >> (64 - bits)) << offset;
  return emu::each(
      [=](auto v, auto w) EMU_INLINE {
        return decltype(v)((ulong(v) & ~mask) | (ulong(w) << offset & mask));
      },
      base, insert);
}

}  // namespace metal
