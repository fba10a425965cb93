// Products with x in shared memory: a pipeline in which four warps prefetch stages of 128 values of
// k, and all other warps multiply. Barriers in shared memory signal which stages are full and which
// are empty. docs/lab has the measurements.
//
// MULTIPLIER    the warps that multiply: Warpgroups of wgmma.cuh or Warps of mma_staged.cuh. It has
//               TOGETHER, the number of warps that multiply together; Order, the layout of a stage;
//               and multiply_stages, the main loop
// L             Tiling; slices of k take the stages of a split in turn
// STAGES        stages of x in shared memory: a multiple of SIMDGROUPS_K, and of 4, or of 2 from
//               4 fragments on
// W             WeightFormat; weights are packed

// Number of stages whose weights are prefetched: fewer warps need more stages, and have the
// registers for them.
template <typename W>
METAL_FUNC constexpr int stages_ahead() {
  return THREADS > 512 || W::BITS > 4 ? 1 : 2;
}

// A warp's weights of the next stages of its slice, prefetched into registers. Each half of a stage
// is loaded into the registers of the half that was used last.
template <int SLICES, typename W, bool ALIGNED, typename S>
struct Incoming {
  static constexpr int AHEAD = stages_ahead<W>();
  static constexpr int GROUPS = groups_of_tile<W>();
  static constexpr int SETS = W::GROUP == 128 ? 1 : HALVES;  // one group of 128 per stage
  static constexpr bool LONG_GROUPS = W::GROUP == 0 || W::GROUP > STAGE_K;
  uint words[AHEAD][HALVES][words_of_tile<W>()] = {};
  Numbers<W, S> numbers[AHEAD][SETS][GROUPS] = {};
  WeightTile<S> tile;  // begins at the stage that is loaded next
  int k;               // first k of that stage
  int k_stop;  // no weights are loaded from here on

  METAL_FUNC Incoming(WeightTile<S> tile, int k, int k_stop, Work work)
      : tile(tile), k(k), k_stop(k_stop) {
    advance(k);
    UNROLL for (int ahead = 0; ahead < AHEAD; ++ahead) {
      UNROLL for (int half = 0; half < HALVES; ++half) {
        load(ahead, half, work);
      }
      pass();
    }
  }

  METAL_FUNC void load(int ahead, int half, Work work) {
    if (k + half * TILE_K < k_stop) {
      load_tile<W, ALIGNED>(words[ahead][half], tile, half * TILE_K, STAGE_K, work);
      if (half + 1 == HALVES || SETS > 1) {
        const int first = (SETS == 1 ? 0 : half * TILE_K) + (LONG_GROUPS ? k : 0);
        load_groups<W, ALIGNED>(numbers_of(ahead, half), tile, first, first + TILE_K, work);
      }
    }
  }

  METAL_FUNC void pass() {
    advance(SLICES * STAGE_K);
    k += SLICES * STAGE_K;
  }

  METAL_FUNC void advance(int distance) {
    advance_words<W>(tile, distance);
    if (!LONG_GROUPS) {
      advance_numbers<W>(tile, distance);
    }
  }

  METAL_FUNC Numbers<W, S>* numbers_of(int ahead, int half) {
    return numbers[ahead][SETS == 1 ? 0 : half];
  }

  // Return the group parameters of step `step`, and weights `pair` of row fragment f.
  template <typename T>
  METAL_FUNC GroupParams<T> params(int ahead, int half, int step) {
    return group_params_of<W, T>(numbers_of(ahead, half)[GROUPS == 1 ? 0 : step]);
  }

  template <typename T>
  METAL_FUNC uint weights(int ahead, int half, int f, int pair, const GroupParams<T>* params) {
    const int step = pair / W::PAIRS;
    const uint* own = words[ahead][half] + step * words_of_step<W>();
    return marlin::weights<W>(own, f, pair % W::PAIRS, params[step]);
  }
};

template <
    typename MULTIPLIER,
    typename L,
    int STAGES,
    typename W,
    typename T,
    typename S,
    typename O,
    typename E>
METAL_FUNC void staged(
    const T* x, Weights<S> weights, Work work, O out, E epilogue, float* shared) {
  constexpr int FRAGMENTS_M = L::FRAGMENTS_M;
  constexpr int SIMDGROUPS_N = L::SIMDGROUPS_N;
  constexpr int SIMDGROUPS_K = L::SIMDGROUPS_K;
  constexpr int TILE_M = FRAGMENT_ROWS * FRAGMENTS_M;
  constexpr int TOGETHER = MULTIPLIER::TOGETHER;
  constexpr int COLUMNS = (SIMDGROUPS_N + TOGETHER - 1) / TOGETHER * TOGETHER;  // warps along n
  constexpr int MULTIPLIERS = COLUMNS * SIMDGROUPS_K;
  constexpr int SIMDGROUPS = MULTIPLIERS + LOADERS;
  const int warp = warp_of_thread(threadIdx.x);
  const int lane_index = threadIdx.x % 32;
  const Lane lane = lane_of(lane_index);
  const int column = warp % COLUMNS;
  const int slice = warp / COLUMNS;
  const Ring<FRAGMENTS_M, STAGES> ring = {shared_at(shared)};
  float* scratch = shared + BARRIERS_BYTES / 4;  // shares its memory with the stages
  float* own = scratch + (column * SIMDGROUPS_K + slice) * TILE_M * SCRATCH_ROW;
  const bool aligned = is_aligned(x) && is_aligned(weights);
  if (threadIdx.x == 0) {
    UNROLL for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full(i), pieces_of_stage<FRAGMENTS_M>());
      barrier_init(ring.empty(i), COLUMNS);
    }
    barriers_ready();
  }
  __syncthreads();
  uint first = 0;  // number of stages of the previous splits
  Splits<L, 1, W::GROUP> splits = {narrowed<SIMDGROUPS_N>(work), blockIdx.x};
  while (splits.remain()) {
    Split split = splits.next();
    split.col *= SIMDGROUPS_N;
    const IdentityRows row_map = rows_of_product<L::BATCHED>(split, work);
    const int col = column_of_warp<SIMDGROUPS_N>(epilogue, split.col, column, work);
    const bool has_columns = column < SIMDGROUPS_N && col < work.n;
    const WeightTile<S> tile = weight_tile<W>(
        weights, has_columns ? col : split.col, work, lane, split.product);
    float totals[2][FRAGMENTS_M][4] = {};
    if (warp >= MULTIPLIERS) {
      const int loader = warp - MULTIPLIERS;
      if (aligned) {
        fill_stages<FRAGMENTS_M, STAGES, typename MULTIPLIER::Order, W, true>(
            ring, first, x, row_map, work, split, loader, lane_index);
      } else {
        fill_stages<FRAGMENTS_M, STAGES, typename MULTIPLIER::Order, W, false>(
            ring, first, x, row_map, work, split, loader, lane_index);
      }
    } else if (aligned) {
      MULTIPLIER::template multiply_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, true, T>(
          totals, ring, first, tile, has_columns, work, split, slice, lane_index);
    } else {
      MULTIPLIER::template multiply_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, false, T>(
          totals, ring, first, tile, has_columns, work, split, slice, lane_index);
    }
    first += ceil_div(split.k_stop - split.k_start, STAGE_K);
    __syncthreads();
    if (warp < MULTIPLIERS && has_columns) {
      store_sums<FRAGMENTS_M, W>(own, totals, tile);
    }
    __syncthreads();
    store_tile<TILE_M, SIMDGROUPS_N * SIMDGROUPS_K, SIMDGROUPS_N, SIMDGROUPS>(
        out, epilogue, row_map, scratch, work, split, SIMDGROUPS_K, warp, lane_index);
    if (splits.done()) {
      break;
    }
  }
}
