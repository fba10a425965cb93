// Computes out[m, n] = epilogue(rows[m, k] times the transpose of w[n, k]), or a split's partial
// sums in the workspace. `rows`, `out` and `epilogue` are declared before the body.
// Plan: fragments_m, simdgroups_n, simdgroups_k, work. Block: simdgroups_n x simdgroups_k warps; it
// computes one range of k tiles.
extern __shared__ float scratch[];
typedef marlin::Tiling<FRAGMENTS_M, SIMDGROUPS_N, SIMDGROUPS_K, WHOLE, SINGLE, BATCHED> Tiles;
marlin::mma<Tiles, marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    rows,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    epilogue,
    scratch);
