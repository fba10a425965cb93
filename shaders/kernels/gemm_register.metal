// Computes out[m, n] = x[m, k] times the transpose of w[n, k]. If tiles are split, out is the
// workspace [slots, m, n] of partial sums, or the sums are added atomically.
// Plan: fragments_m, simdgroups_m, simdgroups_n (TILES_N), simdgroups_k, operand (OPERAND), work.
// Threadgroup: simdgroups_m x simdgroups_k simdgroups; it computes one range of k tiles.
typedef marlin::Tiling<8 * FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemm_register<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
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
