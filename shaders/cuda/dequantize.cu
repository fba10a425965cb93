// Decodes a block of the weight w[n, k] to out[rows, length], like ../kernels/dequantize.metal.
// Plan: none, only the weight format. Block: any number of warps; each decodes one step of k of 32
// rows of w.
marlin::dequantize<marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    marlin::weights(w, scales, biases),
    shape,
    out,
    (blockIdx.x * blockDim.x + threadIdx.x) / 32,
    threadIdx.x % 32);
