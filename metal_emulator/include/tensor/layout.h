// Which elements of a matrix each lane of a simdgroup holds in a cooperative tensor.
//
// A matrix is cut into fragments of 16x16, of which a lane holds 8 elements. Rows and
// columns are those of the matrix as it is stored: a transposed right operand is
// [n][k].
#pragma once
#include "kernel.h"

namespace emu::tensor {

constexpr u32 kFragment = 16;
constexpr u32 kLaneElements = 8;  // of a fragment

enum class Role { kLeft, kRight, kDestination };

// A matrix operand in memory order.
struct Shape {
  Role role;
  u32 rows, columns;
  bool transposed;

  constexpr u32 capacity() const { return rows * columns / kLanes; }
};

struct Place {
  u32 row, column;
};

// M5 (generation 17): four neighbours in a row, and the four that lie eight rows below.
// MLX's `BaseNAXFrag::get_coord` has the same table.
constexpr Place m5_place(u32 lane, u32 element) {
  u32 quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4 + element / 4 * 8,
          ((quad & 2) + lane % 2) * 4 + element % 4};
}

// Generation 16 holds 8x8 matrices in the lanes' old order. Only the sets of rows and
// columns of a lane are known (MLX, pull requests 3470 and 3474), not the order of its
// elements: here columns first.
constexpr Place g16_place(u32 lane, u32 element) {
  return {fragment_row(lane) + element / 4 * 8,
          fragment_column(lane) + element % 2 + element % 4 / 2 * 8};
}

// No GPU's: a kernel that passes with it asks for its indices.
constexpr Place scrambled_place(u32 lane, u32 element) {
  return m5_place((13 * lane + 7) % kLanes, (5 * element + 3) % kLaneElements);
}

#ifndef MSLEMU_TENSOR_LAYOUT
#define MSLEMU_TENSOR_LAYOUT m5
#endif
#define EMU_JOIN(name, suffix) name##suffix
#define EMU_PLACE(name) EMU_JOIN(name, _place)
constexpr bool kScrambled =
    EMU_PLACE(MSLEMU_TENSOR_LAYOUT)(0, 0).column != m5_place(0, 0).column;

// The order of the fragments: the inner dimension of the product comes last in the left
// operand, first in the right one, however they are stored.
constexpr Place fragment_place(const Shape& shape, u32 fragment) {
  u32 across = shape.columns / kFragment, down = shape.rows / kFragment;
  if (kScrambled) fragment = across * down - 1 - fragment;
  if (shape.transposed) return {fragment % down, fragment / down};
  return {fragment / across, fragment % across};
}

constexpr Place place(const Shape& shape, u32 lane, u32 element) {
  Place fragment = fragment_place(shape, element / kLaneElements);
  Place inside = EMU_PLACE(MSLEMU_TENSOR_LAYOUT)(lane, element % kLaneElements);
  return {fragment.row * kFragment + inside.row,
          fragment.column * kFragment + inside.column};
}

// Where an element lies in the matrix [m][k], [k][n] or [m][n], row by row.
constexpr u32 dense_index(const Shape& shape, u32 lane, u32 element) {
  Place at = place(shape, lane, element);
  return shape.transposed ? at.column * shape.rows + at.row
                          : at.row * shape.columns + at.column;
}

template <Shape shape>
struct Table {
  unsigned short index[kLanes][shape.capacity()];

  constexpr Table() : index{} {
    for (u32 lane = 0; lane < kLanes; ++lane)
      for (u32 i = 0; i < shape.capacity(); ++i)
        index[lane][i] = static_cast<unsigned short>(dense_index(shape, lane, i));
  }
};
template <Shape shape>
inline constexpr Table<shape> table{};

}  // namespace emu::tensor
