// Computes out[m, n] = x[m, k] times the transpose of w[n, k] through threadgroup memory. If
// tiles are split, out is the workspace [slots, m, n], or the sums are added atomically.
// Plan: as for gemm_register, and buffers and loaders. Threadgroup: simdgroups_m x simdgroups_k
// simdgroups that multiply, and `loaders` that only load; it computes one range of k tiles.
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
    marlin::Plain{},
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
