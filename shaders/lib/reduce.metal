// Rows of one column that a thread finishes: of one tile, so its splits are found once.
constant constexpr uint ROWS_OF_THREAD = 4;

// The sum of one output element's splits, in ascending k.
METAL_FUNC float sum_of_splits(const device float* partials, uint place, uint splits, uint size) {
  float total = partials[place];
  for (uint split = 1; split < splits; ++split) {
    total += partials[split * size + place];
  }
  return total;
}

// BATCHED: there are several products. T: dtype of the results. WIDTH: columns of a tile, in
// units of TILE_N.
template <bool BATCHED, typename T, int WIDTH = 1, typename O, typename E>
METAL_FUNC void reduce(
    const device float* partials,
    const constant int32_t* shape,
    const constant int32_t* schedule,
    O out,
    E epilogue,
    uint thread_index) {
  const Work work = read_work(shape, schedule);
  const uint col = thread_index % uint(work.n);
  const uint parts = ceil_div(work.m, ROWS_OF_THREAD);  // of a column
  const uint part = thread_index / uint(work.n);
  const uint product = BATCHED ? part / parts : 0;
  const uint first = (part - product * parts) * ROWS_OF_THREAD;
  Work tiles = work;
  tiles.n = ceil_div(work.n, WIDTH);
  const uint splits = splits_of_element(first, col / WIDTH, product, tiles);
  const uint end = min(first + ROWS_OF_THREAD, uint(work.m));
  const uint size = (BATCHED ? work.batch : 1) * work.m * work.n;
  for (uint row = first; row < end; ++row) {
    const uint whole_row = product * work.m + row;
    const uint place = whole_row * work.n + col;
    const float total = sum_of_splits(partials, place, splits, size);
    out[output_place(epilogue, whole_row, col, work)] = T(finished(total, epilogue, place, col));
  }
}
