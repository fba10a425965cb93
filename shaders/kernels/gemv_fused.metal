// Computes out[ROWS, n] = epilogue(x[ROWS, k] times the transpose of w[n, k]) for one to five
// rows. No tile is split.
// Plan: as for gemv, and the problem's epilogue. Threadgroup: as for gemv.
typedef marlin::Tiling<ROWS, 1, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemv<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
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
