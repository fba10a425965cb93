// Computes out[ROWS, n] = x[ROWS, k] times the transpose of w[n, k] for one to five rows. If
// tiles are split, out is the workspace [slots, ROWS, n], or the sums are added atomically.
// Plan: tile.m (ROWS), simdgroups_n (TILES_N), simdgroups_k, operand (OPERAND), work.
// Threadgroup: simdgroups_k simdgroups; it computes one range of k tiles.
typedef marlin::Tiling<ROWS, 1, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemv<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
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
