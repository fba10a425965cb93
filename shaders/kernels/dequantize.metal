// Decodes a block of the weight w[n, k] to out[rows, length].
// Plan: none, only the weight format. Threadgroup: any number of simdgroups; each decodes one
// step of k of 32 rows of w.
marlin::dequantize<marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>(
    marlin::weights(w, scales, biases),
    shape,
    out,
    thread_position_in_grid.x / 32,
    int(thread_index_in_simdgroup));
