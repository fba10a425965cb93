// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]) through threadgroup
// memory. No tile is split.
// Plan: as for gemm_staged, and the problem's epilogue. Threadgroup: as for gemm_staged.
typedef marlin::Staging<
    BUFFERS,
    LOADERS,
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    FRAGMENT_BYTES,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND>>
    Stages;
threadgroup float scratch[Stages::FLOATS];
marlin::gemm_staged<Stages, TILES_N, WHOLE, RAGGED>(
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
