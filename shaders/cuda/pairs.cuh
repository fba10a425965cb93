// Epilogues for which two columns of a product belong together. HOW has
//
//   first_of_pair(pair, n)   the first one's column; those of a packed tile lie side by side
//   distance_of_pair(n)      from there to the second one
//   TOGETHER                 packed tiles of first columns whose rows are stored together
//   store_pairs(...)         what is stored of their sums
//
// A tile has as many first columns as second ones, so both sums lie in the block's scratch.

// Both sums of a pair.
struct Point {
  float x;
  float y;
};

template <typename HOW>
struct Paired {
  HOW how;
};

// First column of a warp's packed tile, of the tiles of WIDTH packed ones that begin at col; n or
// more if it has none.
template <int WIDTH, typename E>
METAL_FUNC int column_of_warp(E, int col, int column, Work work) {
  return col + TILE_N * column;
}

template <int WIDTH, typename HOW>
METAL_FUNC int column_of_warp(Paired<HOW>, int col, int column, Work work) {
  constexpr int PAIRS = WIDTH / 2;
  const int pair = col / 2 + TILE_N * (column % PAIRS);
  if (pair >= work.n / 2) {
    return work.n;
  }
  // mutant: second_column
  return HOW::first_of_pair(pair, work.n) + column / PAIRS * HOW::distance_of_pair(work.n);
}

// The sum of a scratch element of all slices of k, in ascending order.
METAL_FUNC float sum_of_slices(const float* partial, int slices, int distance) {
  float total = partial[0];
  for (int slice = 1; slice < slices; ++slice) {  // mutant: slices
    total += partial[slice * distance];
  }
  return total;
}

// As ../lib/epilogue.metal has it for results of their own.
template <
    int TILE_M,
    int SIMDGROUPS_K,
    int WIDE,
    int SIMDGROUPS,
    typename O,
    typename HOW,
    typename R>
METAL_FUNC void store_tile(
    O out,
    Paired<HOW> epilogue,
    R order,
    const float* scratch,
    Work work,
    Split split,
    int slices,
    int warp,
    int lane_index) {
  constexpr int PAIRS = WIDE / 2;
  constexpr int TOGETHER = HOW::TOGETHER;
  constexpr int ROWS = TILE_M * SCRATCH_ROW;  // of a slice
  static_assert(WIDE % 2 == 0, "a tile has as many first columns as second ones");
  static_assert(PAIRS % TOGETHER == 0, "what is stored together lies in a tile");
  const int rows = min(TILE_M, work.m - split.row);
  for (int line = warp; line < PAIRS / TOGETHER * TILE_M; line += SIMDGROUPS) {
    const int column = line / TILE_M * TOGETHER;  // mutant: columns
    const int row = line % TILE_M;
    const int pair = split.col / 2 + column * TILE_N + lane_index;
    if (row >= rows || pair >= work.n / 2) {
      continue;
    }
    Point sums[TOGETHER];
  UNROLL for (int i = 0; i < TOGETHER; ++i) {
      const float* first = scratch + (column + i) * slices * ROWS + row * SCRATCH_ROW + lane_index;
      const float* second = first + PAIRS * slices * ROWS;
      sums[i] = {sum_of_slices(first, slices, ROWS), sum_of_slices(second, slices, ROWS)};
    }
    epilogue.how.store_pairs(out, output_row(order, split.row + row), pair, sums, work);
  }
}
