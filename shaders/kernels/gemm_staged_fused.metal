// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]) through threadgroup
// memory. No tile is split.
// Plan: as for gemm_staged, and the problem's epilogue. Threadgroup: as for gemm_staged.
typedef marlin::Tiling<8 * FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K, TILES_N, WHOLE> Tiles;
typedef marlin::Staging<
    BUFFERS,
    LOADERS,
    FRAGMENT_BYTES,
    Tiles,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>
    Stages;
threadgroup float scratch[Stages::FLOATS];
marlin::gemm_staged<Stages>(
    x,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
