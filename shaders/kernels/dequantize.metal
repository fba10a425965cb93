// Body of the kernel: a block of the weight w[n, k] as plain numbers, out[rows, length].
marlin::dequantize<marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    w, scales, biases, shape, out, thread_position_in_grid.x / 32, int(thread_index_in_simdgroup));
