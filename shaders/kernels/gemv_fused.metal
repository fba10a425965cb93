// Body of the kernel: a few rows, x[ROWS, k] times the transpose of w[n, k], finished by an
// epilogue, into out[ROWS, n]. No tile may be split.
threadgroup float scratch[SIMDGROUPS_K * ROWS * marlin::SCRATCH_ROW];
marlin::gemv<
    ROWS,
    SIMDGROUPS_K,
    WIDE,
    WHOLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>,
    SUBTRACT>(
    x,
    w,
    scales,
    biases,
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
