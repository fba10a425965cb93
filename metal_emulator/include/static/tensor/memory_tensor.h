// metal::tensor over memory that a pointer names.
#pragma once
#include "../../tensor/tensor_names.h"
#include "kernel.h"

namespace emu {

template <class T, int Inner, int Outer>
struct Slice {
  using element_type = metal::remove_addrspace_t<T>;
  using memory_type = T;
};

}  // namespace emu

namespace metal {

constexpr constant int dynamic_extent = -1;

template <class T, int Rank>
struct dextents {
  template <class... Sizes>
  constexpr dextents(Sizes...) {
  }
};

template <class T, class Extents, class Kind>
struct tensor {
  using element_type = remove_addrspace_t<T>;
  using memory_type = T;

  tensor(T*, Extents);
  tensor(T*, Extents, array<int32_t, 2>);
  template <int Inner, int Outer>
  emu::Slice<T, Inner, Outer> slice(int, int) const thread;
  emu::Slice<T, dynamic_extent, dynamic_extent> slice(int, int) const thread;
};

}  // namespace metal
