// Body of the kernel: adds the splits of each tile in the workspace [slots, m, n] in ascending
// k, as `reduce` does, and finishes each sum by an epilogue.
marlin::reduce<BATCHED, T>(
    partials,
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},  // mutant: epilogue
    thread_position_in_grid.x);
