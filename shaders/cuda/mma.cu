// Computes out[m, n] = epilogue(rows[m, k] times the transpose of w[n, k]), or a split's partial
// sums in the workspace. `rows`, `out` and `epilogue` are declared before the body.
// Plan: fragments_m, simdgroups_n, simdgroups_k, work. Block: simdgroups_n x simdgroups_k warps; it
// computes one range of k tiles.
extern __shared__ float scratch[];
marlin::mma<
    FRAGMENTS_M,
    SIMDGROUPS_N,
    SIMDGROUPS_K,
    WHOLE,
    SINGLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    rows, w, scales, biases, shape, schedule, out, epilogue, scratch);
