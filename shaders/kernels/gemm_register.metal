// Body of the kernel: x[m, k] times the transpose of w[n, k] into out[m, n], or, where tiles
// are split, into the workspace out[slots, m, n].
// mutant: scratch
threadgroup float scratch[SIMDGROUPS_K * SIMDGROUPS_M * FRAGMENTS_M * 8 * marlin::SCRATCH_ROW];
marlin::gemm_register<
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    WIDE,
    WHOLE,
    BATCHED,
    RAGGED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>,
    SUBTRACT,
    WIDEN>(
    x,
    w,
    scales,
    biases,
    shape,
    schedule,
    out,
    marlin::Plain{},
    scratch,
    threadgroup_position_in_grid.x,  // mutant: range
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
