// Body of the kernel: rows of x[., k] times the transpose of the weights w[experts[i], n, k] that
// they chose, into row i of out[., n]; or what was declared before of these and of a second weight.
extern __shared__ float scratch[];
marlin::gather<
    FRAGMENTS_M,
    SIMDGROUPS_N,
    SIMDGROUPS_K,
    BY_PAIR,
    EACH,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x, w, scales, biases, {second, second_scales}, experts, sources, shape, out, epilogue, scratch);
