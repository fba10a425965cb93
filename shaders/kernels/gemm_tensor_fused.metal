// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]) with Metal's tensor
// operations. No tile is split.
// Plan: as for gemm_tensor, and the problem's epilogue.
// Threadgroup: as for gemm_tensor.
typedef marlin::Tiling<marlin::ROUND_ROWS, SIMDGROUPS_M, SIMDGROUPS_K, 1, WHOLE, BATCHED> Tiles;
typedef marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND> Format;
threadgroup float scratch[Tiles::SIMDGROUPS * marlin::ROUND_ROWS * marlin::TILE_N];
marlin::gemm_tensor<Tiles, FRAGMENTS_M / 2, Format>(
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
