// Body of the kernel: as ../kernels/reduce.metal, with the epilogue that was declared before.
const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
if (marlin::is_thread_of_reduce(index, shape, schedule)) {
  marlin::reduce<BATCHED, T, SIMDGROUPS_N>(partials, shape, schedule, out, epilogue, index);
}
