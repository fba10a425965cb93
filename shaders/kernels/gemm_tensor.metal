// Computes out[m, n] = x[m, k] times the transpose of w[n, k] with Metal's tensor operations. If
// tiles are split, out is the workspace [slots, m, n] of partial sums, or the sums are added
// atomically.
// Plan: simdgroups_m, simdgroups_k, subtract (OPERAND), work.
// Threadgroup: simdgroups_m x simdgroups_k simdgroups; it computes one range of k tiles.
threadgroup float scratch[SIMDGROUPS_K * SIMDGROUPS_M * marlin::ROUND_ROWS * marlin::TILE_N];
marlin::gemm_tensor<
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    WHOLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND>>(
    x,
    marlin::weights(w, scales, biases),
    shape,
    schedule,
    out,
    marlin::Plain{},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
