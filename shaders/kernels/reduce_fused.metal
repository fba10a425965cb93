// Adds the splits of each tile in the workspace [slots, m, n] in ascending k, like `reduce`,
// and applies the epilogue to each sum.
// Plan: work, and the problem's epilogue. Threadgroup: as for reduce.
marlin::reduce<ROWS, BATCHED, T>(
    partials,
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    thread_position_in_grid.x);
