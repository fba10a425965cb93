// How a function of scalars becomes one of vectors.
#pragma once
#include "types.h"

namespace emu {

template <class T>
constexpr bool is_float = metal::is_floating_point_v<T>;
template <class T>
using floating = metal::conditional_t<is_float<T>, T, float>;

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

// Calls `function` on every element.
template <class Function, class T, class... Rest>
METAL_FUNC auto each(Function function, const T& first, const Rest&... rest) {
  if constexpr (is_vector<T>) {
    using Element =
        decltype(function(element_of<T>(first[0]), element_of<Rest>(rest[0])...));
    metal::vec<Element, size_of<T>> result;
    for (int i = 0; i < size_of<T>; ++i)
      result[i] = function(element_of<T>(first[i]), element_of<Rest>(rest[i])...);
    return result;
  } else {
    return function(first, rest...);
  }
}

}  // namespace emu
