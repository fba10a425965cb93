// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]) with Metal's tensor
// operations. No tile is split.
// Plan: as for gemm_tensor, and the problem's epilogue.
// Threadgroup: as for gemm_tensor.
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
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
