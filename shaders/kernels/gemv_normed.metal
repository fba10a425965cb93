// Computes out[ROWS, n] = epilogue(rms_norm(x[ROWS, k]) times the transpose of w[n, k]) for one or
// two rows. No tile is split.
// Plan: as for gemv, the problem's epilogue, and EPSILON with the bits of a float. Threadgroup: as
// for gemv.
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
    marlin::normed(
        marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
            bias, multiplier, residual, parts},
        norm,
        EPSILON,
        shape),
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
