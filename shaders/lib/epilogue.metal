// From the simdgroups' partial tiles in threadgroup memory to the output.

// Columns of a scratch row: 32 and four of padding, so that the lanes of a fragment
// (eight rows of w by four pairs of columns) fall into 32 different banks.
constant constexpr int SCRATCH_ROW = TILE_N + 4;

// Adds the SIMDGROUPS_K partial tiles in ascending order and stores what lies inside the
// output: a finished tile, or with several slices of k the slice's own part of the workspace.
template <int TILE_M, int SIMDGROUPS_K, int THREADS, typename O>
METAL_FUNC void store_tile(
    device O* out, const threadgroup float* scratch, Work work, Unit unit, int thread_index) {
  const int rows = min(TILE_M, work.m - unit.row);
  const int cols = min(TILE_N, work.n - unit.col);
  const uint corner = (unit.split * work.m + unit.row) * work.n + unit.col;
  for (int i = thread_index; i < TILE_M * TILE_N; i += THREADS) {
    const int row = i / TILE_N;
    const int col = i % TILE_N;
    if (row >= rows || col >= cols) {
      continue;
    }
    float total = scratch[row * SCRATCH_ROW + col];
  UNROLL for (int s = 1; s < SIMDGROUPS_K; ++s) {
      total += scratch[(s * TILE_M + row) * SCRATCH_ROW + col];
    }
    out[corner + uint(row * work.n + col)] = O(total);
  }
}
