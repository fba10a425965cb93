// Declarations for the body reduce.cu.

#include "prelude.cuh"

namespace marlin {

#include "../lib/work.metal"
#include "../lib/epilogue.metal"
#include "split_output.cuh"
#include "../lib/reduce.metal"

// Metal's grid ends with the last thread. In CUDA the last block is complete, and its surplus
// threads must do nothing.
template <uint ROWS>
METAL_FUNC bool is_thread_of_reduce(uint index, const int* shape, const int* schedule) {
  const Work work = read_work(shape, schedule);
  return index < work.batch * ceil_div(work.m, ROWS) * work.n;
}

}  // namespace marlin
