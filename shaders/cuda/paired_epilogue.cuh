// Epilogues that combine two columns of a product. HOW has
//
//   first_of_pair(pair, n)   first column of a pair; those of a packed tile are consecutive
//   distance_of_pair(n)      distance from the first column to the second
//   TOGETHER                 packed tiles of first columns whose rows are stored together
//   store_pairs(...)         stores the results of the pairs' sums
//
// A tile has as many first columns as second ones, so both sums of a pair are in the block's
// scratch.

// The two sums of a pair.
struct Point {
  float x;
  float y;
};

template <typename HOW>
struct Paired {
  HOW how;
};

// Returns the first column of a warp's packed tile, in the tile of TILES_N packed tiles at `col`; n
// or more if the warp has no columns.
template <int TILES_N, typename E>
METAL_FUNC int column_of_warp(E, int col, int column, Work work) {
  return col + TILE_N * column;
}

template <int TILES_N, typename HOW>
METAL_FUNC int column_of_warp(Paired<HOW>, int col, int column, Work work) {
  constexpr int PAIRS = TILES_N / 2;
  const int pair = col / 2 + TILE_N * (column % PAIRS);
  if (pair >= work.n / 2) {
    return work.n;
  }
  return HOW::first_of_pair(pair, work.n) + column / PAIRS * HOW::distance_of_pair(work.n);
}

// Adds a scratch element of all slices of k, in ascending order.
METAL_FUNC float sum_of_slices(const float* partial, int slices, int distance) {
  float total = partial[0];
  for (int slice = 1; slice < slices; ++slice) {
    total += partial[slice * distance];
  }
  return total;
}

// Stores pairs of columns; ../lib/epilogue.metal has the function for single columns.
template <
    int TILE_M,
    int SIMDGROUPS_K,
    int TILES_N,
    int SIMDGROUPS,
    typename O,
    typename HOW,
    typename R>
METAL_FUNC void store_tile(
    O out,
    Paired<HOW> epilogue,
    R row_map,
    const float* scratch,
    Work work,
    Split split,
    int slices,
    int warp,
    int lane_index) {
  constexpr int PAIRS = TILES_N / 2;
  constexpr int TOGETHER = HOW::TOGETHER;
  constexpr int ROWS = TILE_M * SCRATCH_ROW;  // floats per slice
  static_assert(TILES_N % 2 == 0, "a tile has as many first columns as second ones");
  static_assert(PAIRS % TOGETHER == 0, "what is stored together lies in a tile");
  const int rows = min(TILE_M, work.m - split.row);
  for (int line = warp; line < PAIRS / TOGETHER * TILE_M; line += SIMDGROUPS) {
    const int column = line / TILE_M * TOGETHER;
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
    epilogue.how.store_pairs(out, output_row(row_map, split.row + row), pair, sums, work);
  }
}
