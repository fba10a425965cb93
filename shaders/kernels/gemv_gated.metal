// Computes out[ROWS, n] = activation(x[ROWS, k] times the transpose of w[0:n, k]) * (x times the
// transpose of w[n:2n, k]) for one to five rows. No tile is split; simdgroups_n (TILES_N) is 2.
// Plan: as for gemv, and the activation. Threadgroup: as for gemv.
typedef marlin::Tiling<ROWS, 1, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemv<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
    x,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    marlin::Gated<ACTIVATION>{},
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
