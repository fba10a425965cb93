// Body of the kernel: x[m, k] times the transpose of w[n, k], finished by an epilogue, into
// out[m, n]. No tile may be split.
extern __shared__ float scratch[];
marlin::staged<
    marlin::Warpgroups,
    FRAGMENTS_M,
    SIMDGROUPS_N,
    SIMDGROUPS_K,
    STAGES,
    WHOLE,
    BATCHED,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    x,
    w,
    scales,
    biases,
    shape,
    schedule,
    out,
    marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS>{
        bias, multiplier, residual, parts},
    scratch);
