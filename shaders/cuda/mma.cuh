// The kernel `mma`: every warp runs the main loop of main_loop.cuh for its slice of a split.
//
// FRAGMENTS_M   column fragments (of 8 rows of x) per warp
// SIMDGROUPS_N  packed tiles side by side in each tile
// SIMDGROUPS_K  warps that share the k of a split, one slice each
// WHOLE         every block computes one whole tile
// SINGLE        no block has more than one split of a tile
// BATCHED       there are several products, each with its own weight
// W             WeightFormat
//
// THREADS is the size of a block. The launch bounds must precede the kernel's signature, which MLX
// generates. Without them, a thread could get more registers than a block of this size has.

#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(THREADS, 1)

// Divides n by TILES_N: ../lib/work.metal assumes tiles of one packed tile in width, and these are
// TILES_N packed tiles wide.
template <int TILES_N>
METAL_FUNC Work narrowed(Work work) {
  work.n = ceil_div(work.n, TILES_N);
  return work;
}

template <
    int FRAGMENTS_M,
    int SIMDGROUPS_N,
    int SIMDGROUPS_K,
    bool WHOLE,
    bool SINGLE,
    bool BATCHED,
    typename W,
    typename R,
    typename S,
    typename O,
    typename E>
METAL_FUNC void mma(
    R rows,
    const uint* w,
    const S* scales,
    const S* biases,
    const int* shape,
    const int* schedule,
    O out,
    E epilogue,
    float* scratch) {
  constexpr int TILE_M = 8 * FRAGMENTS_M;
  constexpr int SIMDGROUPS = SIMDGROUPS_N * SIMDGROUPS_K;
  const Work work = read_work(shape, schedule);
  const Range range = range_of_threadgroup<WHOLE>(blockIdx.x, work);
  const int warp = threadIdx.x / 32;
  const int column = warp % SIMDGROUPS_N;
  const int slice = warp / SIMDGROUPS_N;
  const Lane lane = lane_of(threadIdx.x % 32);
  // mutant: aligned
  const bool aligned = is_aligned(rows.x) && is_aligned(w) && is_aligned(scales);
  typename R::Type* storage = (typename R::Type*)(scratch + SIMDGROUPS * TILE_M * SCRATCH_ROW);
  const auto x = prepare_rows(rows, scratch, storage, work);
  float* own = scratch + (column * SIMDGROUPS_K + slice) * TILE_M * SCRATCH_ROW;
  for (uint position = range.begin; position < range.end;) {
    Split split = split_at<1, WHOLE, W::GROUP, BATCHED>(
        position, range.end, blockIdx.x, narrowed<SIMDGROUPS_N>(work));
    split.col *= SIMDGROUPS_N;
    const IdentityRows row_map = rows_of_product<BATCHED>(split, work);
    position += split.k_tile_count;
    const int col = column_of_warp<SIMDGROUPS_N>(epilogue, split.col, column, work);
    if (col < work.n) {
      const WeightTile<S> tile = weight_tile<W>(w, scales, biases, col, work, lane, split.product);
      multiply_split<FRAGMENTS_M, SIMDGROUPS_K, W>(
          own, x, row_map, tile, work, split, slice, aligned);
    }
    __syncthreads();  // mutant: before_store
    store_tile<TILE_M, SIMDGROUPS, SIMDGROUPS_N, SIMDGROUPS>(
        out, epilogue, row_map, scratch, work, split, SIMDGROUPS_K, warp, threadIdx.x % 32);
    if (SINGLE) {  // mutant: after_store
      break;
    }
    __syncthreads();
  }
}
