// Computes residual[rows, N] plus the sum of results[rows, EACH, N] times their scores.
// Plan: none. Threadgroup: any number of threads; a thread computes one element.
marlin::combine<N, EACH>(results, scores, residual, out, thread_position_in_grid.x);
