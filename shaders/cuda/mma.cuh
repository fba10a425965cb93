// The kernel `mma`: every warp runs the main loop of main_loop.cuh for its slice of a split.
//
// L  Tiling
// W  WeightFormat
//
// THREADS is the size of a block. The launch bounds must precede the kernel's signature, which MLX
// generates. Without them, a thread could get more registers than a block of this size has.

#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(THREADS, 1)

// How warps divide a tile, and blocks the product.
template <
    int FRAGMENTS_M_,
    int SIMDGROUPS_N_,
    int SIMDGROUPS_K_,
    bool WHOLE_ = true,
    bool SINGLE_ = true,
    bool BATCHED_ = false>
struct Tiling {
  STATIC int FRAGMENTS_M = FRAGMENTS_M_;    // column fragments (of 8 rows of x) per warp
  STATIC int SIMDGROUPS_N = SIMDGROUPS_N_;  // packed tiles side by side in each tile
  STATIC int SIMDGROUPS_K = SIMDGROUPS_K_;  // warps that share the k of a split, one slice each
  STATIC bool WHOLE = WHOLE_;               // every block computes one whole tile
  STATIC bool SINGLE = SINGLE_;             // no block has more than one split of a tile
  STATIC bool BATCHED = BATCHED_;           // there are several products, each with its own weight
  STATIC int TILE_M = 8 * FRAGMENTS_M_;
  STATIC int SIMDGROUPS = SIMDGROUPS_N_ * SIMDGROUPS_K_;
};

// Divides n by TILES_N: ../lib/work.metal assumes tiles of one packed tile in width, and these are
// TILES_N packed tiles wide.
template <int TILES_N>
METAL_FUNC Work narrowed(Work work) {
  work.n = ceil_div(work.n, TILES_N);
  return work;
}

template <typename L, typename W, typename R, typename S, typename O, typename E>
METAL_FUNC void mma(R rows, Weights<S> weights, Work work, O out, E epilogue, float* scratch) {
  constexpr int TILE_M = L::TILE_M;
  constexpr int SIMDGROUPS_N = L::SIMDGROUPS_N;
  constexpr int SIMDGROUPS_K = L::SIMDGROUPS_K;
  constexpr int SIMDGROUPS = L::SIMDGROUPS;
  const int warp = threadIdx.x / 32;
  const int column = warp % SIMDGROUPS_N;
  const int slice = warp / SIMDGROUPS_N;
  const Lane lane = lane_of(threadIdx.x % 32);
  const bool aligned = is_aligned(rows.x) && is_aligned(weights);
  typename R::Type* storage = (typename R::Type*)(scratch + SIMDGROUPS * TILE_M * SCRATCH_ROW);
  const auto x = prepare_rows(rows, scratch, storage, work);
  float* own = scratch + (column * SIMDGROUPS_K + slice) * TILE_M * SCRATCH_ROW;
  Splits<L, 1, W::GROUP> splits = {narrowed<SIMDGROUPS_N>(work), blockIdx.x};
  while (splits.remain()) {
    Split split = splits.next();
    split.col *= SIMDGROUPS_N;
    const IdentityRows row_map = rows_of_product<L::BATCHED>(split, work);
    const int col = column_of_warp<SIMDGROUPS_N>(epilogue, split.col, column, work);
    if (col < work.n) {
      const WeightTile<S> tile = weight_tile<W>(weights, col, work, lane, split.product);
      multiply_split<L::FRAGMENTS_M, SIMDGROUPS_K, W>(
          own, x, row_map, tile, work, split, slice, aligned);
    }
    __syncthreads();
    store_tile<TILE_M, SIMDGROUPS, SIMDGROUPS_N, SIMDGROUPS>(
        out, epilogue, row_map, scratch, work, split, SIMDGROUPS_K, warp, threadIdx.x % 32);
    if (splits.done()) {
      break;
    }
  }
}
