// Computes products of experts as gather does, adds a bias [experts, n] to each, and gates the
// product with w by that with `second`.
// Plan: as for gather, and the epilogue. Threadgroup: as for gather; with a gate, one half of
// its simdgroups multiplies by w and the other half by `second`.
constexpr int TILE_M = 8 * FRAGMENTS_M * SIMDGROUPS_M;
threadgroup float scratch[SIMDGROUPS_K * TILE_M * marlin::SCRATCH_ROW];
threadgroup int pairs[TILE_M];
marlin::gather_register<
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    DOT_ROWS,
    RAGGED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED, OPERAND>>(
    x,
    marlin::weights(w, scales, biases),
    sources,
    experts,
    shape,
    out,
    marlin::expert_epilogue<GATE, BIAS>(
        marlin::weights(second, second_scales, second_scales), expert_bias, second_bias),
    scratch,
    pairs,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
