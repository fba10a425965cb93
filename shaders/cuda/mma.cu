// Body of the kernel: the rows [m, k] that were declared before times the transpose of w[n, k],
// finished by the epilogue that was declared before, into out[m, n], or as it is into the split's
// slot of a workspace.
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
