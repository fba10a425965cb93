// Computes out[m, n] = x[m, k] times the transpose of w[n, k] with Metal's tensor operations. If
// tiles are split, out is the workspace [slots, m, n] of partial sums, or the sums are added
// atomically.
// Plan: fragments_m, simdgroups_m, simdgroups_k, operand (OPERAND), work.
// Threadgroup: simdgroups_m x simdgroups_k simdgroups; it computes one range of k tiles.
typedef marlin::Tiling<marlin::ROUND_ROWS, SIMDGROUPS_M, SIMDGROUPS_K, 1, WHOLE, BATCHED> Tiles;
typedef marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND> Format;
threadgroup float scratch[Tiles::SIMDGROUPS * marlin::ROUND_ROWS * marlin::TILE_N];
marlin::gemm_tensor<Tiles, FRAGMENTS_M / 2, Format>(
    x,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    marlin::Plain{},
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
