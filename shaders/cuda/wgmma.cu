// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]), or a split's partial sums
// in its slot of the workspace. Plan: as for mma.cu, and buffers (STAGES).
// Block: for each of simdgroups_k slices ceil(simdgroups_n / 4) warpgroups that multiply, and four
// warps that load x; it computes one range of k tiles.
extern __shared__ float scratch[];
marlin::staged<
    marlin::Warpgroups,
    FRAGMENTS_M,
    SIMDGROUPS_N,
    SIMDGROUPS_K,
    STAGES,
    WHOLE,
    SINGLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x, w, scales, biases, shape, schedule, out, epilogue, scratch);
