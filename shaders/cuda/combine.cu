// Body of the kernel: residual[rows, N] plus the sum of results[rows, EACH, N] times their scores.
marlin::combine<N, EACH>(results, scores, residual, out, blockIdx.x* blockDim.x + threadIdx.x);
