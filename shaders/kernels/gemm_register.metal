// Body of the kernel: x[m, k] times the transpose of w[n, k] into out[m, n], or, with
// several slices of k, into the workspace out[k_parallel, m, n].
threadgroup float scratch[SIMDGROUPS_K * SIMDGROUPS_M * FRAGMENTS_M * 8 * SCRATCH_ROW];
gemm_register<FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K, GROUP, PACKED, SUBTRACT, WIDEN>(
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
