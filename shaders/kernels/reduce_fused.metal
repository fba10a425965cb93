// Body of the kernel: adds the splits of each tile in the workspace [slots, m, n] in ascending
// k, as `reduce` does, and finishes each sum by an epilogue.
const uint place = thread_position_in_grid.x;
const Work work = read_work(shape, schedule);
const float total = sum_of_splits(partials, place, work);
out[place] = T(finished(
    total,
    Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL>{bias, multiplier, residual},
    place,
    place % work.n));
