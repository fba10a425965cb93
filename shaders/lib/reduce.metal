// Adds the splits of the thread's rows, in ascending k. The loads of different rows are
// independent.
template <uint ROWS>
METAL_FUNC void sums_of_splits(
    thread float* totals,
    const device float* partials,
    uint index,
    uint rows,
    uint n,
    uint splits,
    uint size) {
  UNROLL for (uint i = 0; i < ROWS; ++i) {
    totals[i] = i < rows ? partials[index + i * n] : 0.0f;
  }
  for (uint split = 1; split < splits; ++split) {
    UNROLL for (uint i = 0; i < ROWS; ++i) {
      totals[i] += i < rows ? partials[split * size + index + i * n] : 0.0f;
    }
  }
}

// ROWS: rows of one column per thread; they are in one tile, so its splits are counted once.
// BATCHED: there are several products. T: dtype of the results. TILES_N: columns of a tile, in
// units of TILE_N.
template <uint ROWS, bool BATCHED, typename T, int TILES_N = 1, typename O, typename E>
METAL_FUNC void reduce(
    const device float* partials,
    const constant int32_t* shape,
    const constant int32_t* schedule,
    O out,
    E epilogue,
    uint thread_index) {
  const Work work = read_work(shape, schedule);
  const uint col = thread_index % uint(work.n);
  const uint parts = ceil_div(work.m, ROWS);  // threads per column
  const uint part = thread_index / uint(work.n);
  const uint product = BATCHED ? part / parts : 0;
  const uint first = (part - product * parts) * ROWS;
  Work tiles = work;
  tiles.n = ceil_div(work.n, TILES_N);
  const uint splits = splits_of_element(first, col / TILES_N, product, tiles);
  const uint rows = min(ROWS, uint(work.m) - first);
  const uint size = (BATCHED ? work.batch : 1) * work.m * work.n;
  const uint first_row = product * work.m + first;
  float totals[ROWS];
  sums_of_splits<ROWS>(totals, partials, first_row * work.n + col, rows, work.n, splits, size);
  UNROLL for (uint i = 0; i < ROWS; ++i) {
    if (i < rows) {
      const uint index = (first_row + i) * work.n + col;
      out[output_index(epilogue, first_row + i, col, work)] =
          T(apply_epilogue(totals[i], epilogue, index, col));
    }
  }
}
