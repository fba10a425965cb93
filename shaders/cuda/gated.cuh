// The layers gate and up of a gated network as one weight: what is stored is the activation of the
// first half of the columns times the second half. A tile has as many columns of one as of the
// other, so both sums that make a result lie in the block's scratch.

template <int ACTIVATION>
struct Gated {};

// First column of a warp's packed tile, of the tiles of WIDTH packed ones that begin at col; n or
// more if it has none.
template <int WIDTH, typename E>
METAL_FUNC int column_of_warp(E, int col, int column, Work work) {
  return col + TILE_N * column;
}

template <int WIDTH, int ACTIVATION>
METAL_FUNC int column_of_warp(Gated<ACTIVATION>, int col, int column, Work work) {
  constexpr int PAIRS = WIDTH / 2;
  const int half = work.n / 2;
  const int own = col / 2 + TILE_N * (column % PAIRS);
  return own < half ? own + column / PAIRS * half : work.n;
}

// The sum of a scratch element of all slices of k, in ascending order.
METAL_FUNC float sum_of_slices(const float* partial, int slices, int distance) {
  float total = partial[0];
  for (int slice = 1; slice < slices; ++slice) {
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
    int ACTIVATION,
    typename R>
METAL_FUNC void store_tile(
    O out,
    Gated<ACTIVATION>,
    R order,
    const float* scratch,
    Work work,
    Split split,
    int slices,
    int warp,
    int lane_index) {
  static_assert(WIDE % 2 == 0, "a tile has as many columns of gate as of up");
  constexpr int PAIRS = WIDE / 2;
  constexpr int ROWS = TILE_M * SCRATCH_ROW;  // of a slice
  const int rows = min(TILE_M, work.m - split.row);
  const int half = work.n / 2;
  for (int line = warp; line < PAIRS * TILE_M; line += SIMDGROUPS) {
    const int column = line / TILE_M;
    const int row = line % TILE_M;
    const int col = split.col / 2 + column * TILE_N + lane_index;
    if (row >= rows || col >= half) {
      continue;
    }
    const float* gate = scratch + column * slices * ROWS + row * SCRATCH_ROW + lane_index;
    const float* up = gate + PAIRS * slices * ROWS;
    const float value =
        activate<ACTIVATION>(sum_of_slices(gate, slices, ROWS)) * sum_of_slices(up, slices, ROWS);
    store(out, 0, 0, output_row(order, split.row + row) * half + col, value);
  }
}
