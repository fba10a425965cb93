// Computes out[m, n] = epilogue(x[m, k] times the transpose of w[n, k]), or a split's partial sums
// in its slot of the workspace. Plan: as for mma.cu, and buffers (STAGES).
// Block: for each of simdgroups_k slices ceil(simdgroups_n / 4) warpgroups that multiply, and four
// warps that load x; it computes one range of k tiles.
extern __shared__ float scratch[];
typedef marlin::Tiling<FRAGMENTS_M, SIMDGROUPS_N, SIMDGROUPS_K, WHOLE, SINGLE, BATCHED> Tiles;
marlin::staged<marlin::Warpgroups, Tiles, STAGES, marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x,
    marlin::weights(w, scales, biases),
    marlin::read_work(shape, schedule),
    out,
    epilogue,
    scratch);
