// Body of the kernel: a few rows, x[ROWS, k] times the transpose of w[n, k] into out[ROWS, n],
// or, where tiles are split, into the workspace out[slots, ROWS, n].
threadgroup float scratch[SIMDGROUPS_K * ROWS * marlin::SCRATCH_ROW];  // mutant: scratch
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
    marlin::Plain{},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
