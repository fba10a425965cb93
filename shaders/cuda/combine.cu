// Computes residual[rows, N] plus the sum of results[rows, EACH, N] times their scores.
// Plan: none. Block: any number of threads; a thread computes one element.
marlin::combine<N, EACH>(results, scores, residual, out, blockIdx.x* blockDim.x + threadIdx.x);
