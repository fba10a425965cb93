// Computes products of experts as gather does, adds a bias [experts, n] to each, and gates the
// product with w by that with `second`.
// Plan: as for gather, and the epilogue. Threadgroup: as for gather; with a gate, one half of
// its simdgroups multiplies by w and the other half by `second`.
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
    marlin::expert_epilogue<GATE, BIAS>(
        marlin::weights(second, second_scales, second_scales), expert_bias, second_bias),
    marlin::Simdgroup{
        scratch,
        threadgroup_position_in_grid.x,
        int(simdgroup_index_in_threadgroup),
        int(thread_index_in_simdgroup)});
