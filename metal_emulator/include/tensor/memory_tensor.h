// metal::tensor over memory that a pointer names, and parts of it.
#pragma once
#include "kernel.h"
#include "tensor_names.h"

namespace metal {

constexpr int dynamic_extent = -1;

template <class Index, int Rank>
struct dextents {
  static_assert(Rank == 2, "tensors of two dimensions are emulated");
  Index sizes[Rank];

  METAL_FUNC constexpr dextents(Index inner, Index outer) : sizes{inner, outer} {}
  METAL_FUNC constexpr Index extent(int dimension) const { return sizes[dimension]; }
};

}  // namespace metal

namespace emu::tensor {

// Columns and rows of a matrix in memory. What lies outside of the sizes is read as zero
// and not written.
template <class T>
struct View {
  T* data;
  int sizes[2];
  int strides[2];

  METAL_FUNC bool contains(int inner, int outer) const {
    return inner < sizes[0] && outer < sizes[1];
  }
  METAL_FUNC T& at(int inner, int outer) const {
    return data[long(inner) * strides[0] + long(outer) * strides[1]];
  }
  METAL_FUNC T read(int inner, int outer) const {
    return contains(inner, outer) ? at(inner, outer) : T(0);
  }
  METAL_FUNC void write(int inner, int outer, T value) const {
    if (contains(inner, outer)) at(inner, outer) = value;
  }
  // `size` limits a dimension, unless it is dynamic_extent.
  METAL_FUNC View part(int inner, int outer, int inner_size, int outer_size) const {
    return {&at(inner, outer),
            {remaining(sizes[0] - inner, inner_size),
             remaining(sizes[1] - outer, outer_size)},
            {strides[0], strides[1]}};
  }

 private:
  METAL_FUNC static int remaining(int rest, int size) {
    return size != metal::dynamic_extent && size < rest ? size : rest;
  }
};

template <class T, int Inner, int Outer>
struct Slice : View<T> {};

}  // namespace emu::tensor

namespace metal {

template <class T, class Extents, class Kind>
class tensor : public emu::tensor::View<T> {
  static_assert(is_same_v<Kind, tensor_inline>, "tensor_inline is emulated");

 public:
  METAL_FUNC tensor(T* data, Extents extents)
      : tensor(data, extents, array<int, 2>{{1, int(extents.extent(0))}}) {}
  METAL_FUNC tensor(T* data, Extents extents, array<int, 2> strides)
      : emu::tensor::View<T>{data,
                             {int(extents.extent(0)), int(extents.extent(1))},
                             {strides[0], strides[1]}} {}

  template <int Inner, int Outer>
  METAL_FUNC emu::tensor::Slice<T, Inner, Outer> slice(int inner, int outer) const {
    return {this->part(inner, outer, Inner, Outer)};
  }
  METAL_FUNC auto slice(int inner, int outer) const {
    return slice<dynamic_extent, dynamic_extent>(inner, outer);
  }
};

}  // namespace metal

namespace emu::tensor {

template <class T>
struct ViewOf {
  static constexpr bool is_view = false;
};
template <class T, int Inner, int Outer>
struct ViewOf<Slice<T, Inner, Outer>> {
  static constexpr bool is_view = true;
  using element = T;
};
template <class T, class Extents>
struct ViewOf<metal::tensor<T, Extents, metal::tensor_inline>> {
  static constexpr bool is_view = true;
  using element = T;
};
template <class T>
constexpr bool is_view = ViewOf<T>::is_view;

}  // namespace emu::tensor
