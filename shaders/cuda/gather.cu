// Computes products of experts: row i of out[., n] is the row of x[., k] of pair i times the
// transpose of w[experts[i], n, k], or an epilogue of this product and that of a second weight.
// Plan: fragments_m, simdgroups_n, simdgroups_k, by_pair, pairs_per_row (EACH). Block: simdgroups_n
// x simdgroups_k warps; it computes one tile of columns of one expert.
extern __shared__ float scratch[];
typedef marlin::Tiling<FRAGMENTS_M, SIMDGROUPS_N, SIMDGROUPS_K> Tiles;
marlin::gather<Tiles, BY_PAIR, EACH, marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x,
    marlin::expert_weights(w, scales, biases, second, second_scales),
    marlin::Choices{experts, sources, shape},
    out,
    epilogue,
    scratch);
