// Rows of one column that a thread finishes: of one tile, so its splits are found once.
constant constexpr uint ROWS_OF_THREAD = 4;

// The sum of one output element's splits, in ascending k.
METAL_FUNC float sum_of_splits(const device float* partials, uint place, uint splits, Work work) {
  const uint size = work.m * work.n;
  float total = partials[place];
  for (uint split = 1; split < splits; ++split) {
    total += partials[split * size + place];
  }
  return total;
}

template <typename O, typename E>
METAL_FUNC void reduce(
    const device float* partials,
    const constant int32_t* shape,
    const constant int32_t* schedule,
    device O* out,
    E epilogue,
    uint thread_index) {
  const Work work = read_work(shape, schedule);
  const uint col = thread_index % uint(work.n);
  const uint first = thread_index / uint(work.n) * ROWS_OF_THREAD;
  const uint splits = splits_of_element(first, col, work);
  const uint end = min(first + ROWS_OF_THREAD, uint(work.m));
  for (uint row = first; row < end; ++row) {
    const uint place = row * work.n + col;
    const float total = sum_of_splits(partials, place, splits, work);
    out[output_place(epilogue, row, col, work)] = O(finished(total, epilogue, place, col));
  }
}
