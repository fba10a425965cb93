// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]). No tile is split.
// Plan: as for gemm_register, and the problem's epilogue.
// Threadgroup: as for gemm_register.
threadgroup float scratch[SIMDGROUPS_K * SIMDGROUPS_M * FRAGMENTS_M * 8 * marlin::SCRATCH_ROW];
marlin::gemm_register<
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    TILES_N,
    WHOLE,
    BATCHED,
    RAGGED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND>>(
    x,
    marlin::weights(w, scales, biases),
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},  // mutant: epilogue
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
