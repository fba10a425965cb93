// Computes out[ROWS, n] = activation(y[ROWS, k] times the transpose of w[0:n, k]) * (y times the
// transpose of w[n:2n, k]) for one or two rows, where y = rms_norm(x). No tile is split;
// simdgroups_n (TILES_N) is 2.
// Plan: as for gemv, the activation, and EPSILON with the bits of a float. Threadgroup: as for
// gemv.
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
    marlin::normed(marlin::Gated<ACTIVATION>{}, norm, EPSILON, shape),
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
