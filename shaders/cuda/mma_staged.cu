// Body of the kernel: x[m, k] times the transpose of w[n, k], finished by the epilogue that was
// declared before, into out[m, n], or as it is into the split's slot of a workspace.
extern __shared__ float scratch[];
marlin::staged<
    marlin::Warps,
    FRAGMENTS_M,
    SIMDGROUPS_N,
    SIMDGROUPS_K,
    STAGES,
    WHOLE,
    SINGLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x, w, scales, biases, shape, schedule, out, epilogue, scratch);
