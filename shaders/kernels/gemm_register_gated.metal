// Computes out[m, n] = activation(x[m, k] times the transpose of w[0:n, k]) * (x times the
// transpose of w[n:2n, k]). No tile is split; simdgroups_n (TILES_N) is 2.
// Plan: as for gemm_register, and the activation.
// Threadgroup: as for gemm_register.
typedef marlin::Tiling<8 * FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K, TILES_N, WHOLE, BATCHED> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
marlin::gemm_register<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>>(
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
