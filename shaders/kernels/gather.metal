// Computes products of experts: row i of out[., n] is a row of x[., k] times the transpose of
// w[experts[i], n, k]. The row is i / shape[3], or sources[i] if that is 0.
// Plan: fragments_m, simdgroups_m, simdgroups_k, dot_rows, operand (OPERAND). Threadgroup:
// simdgroups_m x simdgroups_k simdgroups; it computes one column of tiles of one expert.
typedef marlin::Tiling<8 * FRAGMENTS_M, SIMDGROUPS_M, SIMDGROUPS_K> Tiles;
threadgroup float scratch[Tiles::SCRATCH];
threadgroup int pairs[Tiles::TILE_M];
marlin::gather_register<
    Tiles,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND, RAGGED>,
    DOT_ROWS>(
    x,
    marlin::weights(w, scales, biases),
    marlin::Choices{experts, sources, shape, pairs},
    out,
    marlin::Plain{},
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
