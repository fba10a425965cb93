// Body of the kernel: a few rows, x[ROWS, k] times the transpose of w[n, k] into out[ROWS, n],
// or, with several slices of k, into the workspace out[k_parallel, ROWS, n].
threadgroup float scratch[SIMDGROUPS_K * ROWS * SCRATCH_ROW];
gemv<ROWS, SIMDGROUPS_K, GROUP, PACKED, SUBTRACT>(
    x,
    w,
    scales,
    biases,
    params,
    out,
    scratch,
    int(threadgroup_position_in_grid.x),
    int(threadgroups_per_grid.x),
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
