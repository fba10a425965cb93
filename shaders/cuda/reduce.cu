// Adds the splits of each tile in ascending k, like ../kernels/reduce.metal, and applies the
// epilogue that is declared before the body.
// Plan: simdgroups_n, work. Block: any number of threads; a thread has up to ROWS rows of a
// column.
const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
if (marlin::is_thread_of_reduce<ROWS>(index, shape, schedule)) {
  marlin::reduce<ROWS, BATCHED, T, SIMDGROUPS_N>(partials, shape, schedule, out, epilogue, index);
}
