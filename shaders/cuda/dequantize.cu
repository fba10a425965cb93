// Body of the kernel: as ../kernels/dequantize.metal.
marlin::dequantize<marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    w, scales, biases, shape, out, (blockIdx.x * blockDim.x + threadIdx.x) / 32, threadIdx.x % 32);
