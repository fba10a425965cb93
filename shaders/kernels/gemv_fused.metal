// Computes out[ROWS, n] = epilogue(x[ROWS, k] times the transpose of w[n, k]) for one to five
// rows. No tile is split.
// Plan: as for gemv, and the problem's epilogue. Threadgroup: as for gemv.
threadgroup float scratch[SIMDGROUPS_K * ROWS * marlin::SCRATCH_ROW];
marlin::gemv<
    ROWS,
    SIMDGROUPS_K,
    TILES_N,
    WHOLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND>>(
    x,
    marlin::weights(w, scales, biases),
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
