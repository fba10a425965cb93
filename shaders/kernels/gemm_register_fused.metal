// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]). No tile is split.
// Plan: as for gemm_register, and the problem's epilogue.
// Threadgroup: as for gemm_register.
typedef marlin::Tiling<8 * FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemm_register<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
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
