// Computes out[ROWS, n] = activation(y[ROWS, k] times the transpose of w[0:n, k]) * (y times the
// transpose of w[n:2n, k]) for one or two rows, where y = rms_norm(x). No tile is split;
// simdgroups_n (TILES_N) is 2.
// Plan: as for gemv, the activation, and EPSILON with the bits of a float. Threadgroup: as for
// gemv.
typedef marlin::Tiling<ROWS, 1, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemv<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
    x,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    marlin::normed(marlin::Gated<ACTIVATION>{}, norm, EPSILON, shape),
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
