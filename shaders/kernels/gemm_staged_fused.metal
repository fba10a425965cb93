// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]) through threadgroup
// memory. No tile is split.
// Plan: as for gemm_staged, and the problem's epilogue. Threadgroup: as for gemm_staged.
typedef marlin::Staging<
    BUFFERS,
    LOADERS,
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    WIDEN,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>
    Stages;
threadgroup float scratch[Stages::FLOATS];
marlin::gemm_staged<Stages, TILES_N, WHOLE, RAGGED, SUBTRACT>(
    marlin::make_operands(x, w, scales, biases),
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
