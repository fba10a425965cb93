// Computes products of experts: row i of out[., n] is a row of x[., k] times the transpose of
// w[experts[i], n, k]. The row is i / shape[3], or sources[i] if that is 0.
// Plan: fragments_m, simdgroups_m, simdgroups_k, dot_rows, subtract (OPERAND). Threadgroup:
// simdgroups_m x simdgroups_k simdgroups; it computes one column of tiles of one expert.
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
    marlin::Plain{},
    scratch,
    pairs,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
