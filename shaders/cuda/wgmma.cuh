// For more rows than mma.cuh is good at, on Hopper: four warps multiply 64 rows of w, out of
// registers as there, by up to 64 rows of x, out of shared memory. Four further warps fill that,
// ahead, a stage of 128 values of k after the other; barriers in shared memory say which stage is
// full and which is free. What was measured on the way here stands in docs/cuda.md.
//
// FRAGMENTS_M   fragments of 8 rows of x in a tile: 2, 3, 4, 6 or 8
// SIMDGROUPS_N  packed tiles side by side in each tile
// SIMDGROUPS_K  slices of k: the stages of a split go to them in turn
// STAGES        of x that shared memory holds: a multiple of SIMDGROUPS_K, and of 4, or of 2 from
//               4 fragments on
// WHOLE, BATCHED, W as in mma.cuh; weights are packed

// Fragments of w that a warp holds at once: while products read one, the next is decoded, where
// there are registers for it.
METAL_FUNC constexpr int fragment_sets() {
  return THREADS > 512 ? 1 : 2;
}

// Stages whose words are on the way: fewer warps need more, and have the registers.
template <typename W>
METAL_FUNC constexpr int stages_ahead() {
  return THREADS > 512 || W::BITS > 4 ? 1 : 2;
}

// One split of a tile, as far as one warp computes it: every SLICES-th stage from `slice` on.
// A warp without columns of its own goes along, because its three others need it.
template <int FRAGMENTS, int SLICES, int STAGES, typename W, bool ALIGNED, typename T, typename S>
METAL_FUNC void multiply_stages(
    float (*totals)[FRAGMENTS][4],
    Ring<FRAGMENTS, STAGES> ring,
    uint first,
    const WeightTile<S>& tile,
    bool has_columns,
    Work work,
    Split split,
    int slice,
    int lane_index) {
  constexpr int SETS = fragment_sets();
  constexpr int AHEAD = stages_ahead<W>();
  constexpr int PRODUCTS = W::PAIRS / 2;
  constexpr int STEPS = TILE_K / W::STEP;
  constexpr int GROUPS = groups_of_tile<W>();
  // Groups of 128 are a stage's.
  constexpr int SETS_OF_NUMBERS = W::GROUP == 128 ? 1 : HALVES;
  // Else a slice could be a turn ahead of another that has the place before it.
  static_assert(STAGES % SLICES == 0, "a place has one slice");
  const int stages = ceil_div(split.k_stop - split.k_start, STAGE_K);
  uint words[AHEAD][HALVES][words_of_tile<W>()] = {};
  Numbers<W, S> numbers[AHEAD][SETS_OF_NUMBERS][GROUPS] = {};
  uint rows[SETS][4][4];
  const int k_own = has_columns ? split.k_stop : 0;  // before it there is something to load
  int k = split.k_start + slice * STAGE_K;
  UNROLL for (int ahead = 0; ahead < AHEAD; ++ahead) {
    UNROLL for (int half = 0; half < HALVES; ++half) {
      const int here = k + ahead * SLICES * STAGE_K + half * TILE_K;
      if (here < k_own) {
        load_tile<W, ALIGNED>(words[ahead][half], tile, here, k_own, work);
        if (half < SETS_OF_NUMBERS) {
          load_groups<W, ALIGNED>(numbers[ahead][half], tile, here, k_own, work);
        }
      }
    }
  }
  Turn<STAGES> turn(first + slice);
  int read = -1;  // a stage whose last products may be unfinished
  for (int nth = slice; nth < stages;) {
    UNROLL for (int ahead = 0; ahead < AHEAD; ++ahead) {
      if (nth >= stages) {
        break;
      }
      barrier_wait(ring.full(turn.stage), turn.parity);
      const Columns stage = columns_at<FRAGMENTS>(ring.at(turn.stage));
      UNROLL for (int half = 0; half < HALVES; ++half) {
        if (half > 0 && k + half * TILE_K >= split.k_stop) {
          break;
        }
        Numbers<W, S>* own_numbers = numbers[ahead][SETS_OF_NUMBERS == 1 ? 0 : half];
        Quantizers<T> quantizers[STEPS];
        UNROLL for (int step = 0; step < STEPS; ++step) {
          quantizers[step] = quantizers_of<W, T>(own_numbers[GROUPS == 1 ? 0 : step]);
        }
        UNROLL for (int j = 0; j < STEPS * PRODUCTS; j += 2) {
          uint (*own)[4] = rows[j / 2 % SETS];
          const int step = j / PRODUCTS;
          UNROLL for (int i = 0; i < 16; ++i) {
            // Row fragments 2 f and 2 f + 1 of products j and j + 1.
            const int f = i / 4 % 2;
            own[i / 4][i % 4] = weights<W>(
                words[ahead][half] + step * words_of_step<W>(),
                2 * f + i % 2,
                2 * (j % PRODUCTS + i / 8) + i % 4 / 2,
                quantizers[step]);
          }
          // Of this half, nothing is needed any more.
          const int later = k + AHEAD * SLICES * STAGE_K + half * TILE_K;
          if (j + 2 == STEPS * PRODUCTS && later < k_own) {
            load_tile<W, ALIGNED>(words[ahead][half], tile, later, k_own, work);
            if (half + 1 == HALVES || SETS_OF_NUMBERS > 1) {
              const int group_k = SETS_OF_NUMBERS == 1 ? later - half * TILE_K : later;
              load_groups<W, ALIGNED>(own_numbers, tile, group_k, k_own, work);
            }
          }
          products_begin();
          UNROLL for (int i = 0; i < 4; ++i) {
            const int matrix = (half * (TILE_K / 8) + 2 * (j + i / 2)) * FRAGMENTS;
            multiply_by_shared(
                totals[i % 2],
                own[i],
                after(stage, matrix * 128),
                T(),
                Fragments<FRAGMENTS>());
          }
          products_commit();
          products_wait<SETS - 1>();
          if (SETS > 1 && half == 0 && j == 0 && read >= 0 && lane_index == 0) {
            barrier_arrive(ring.empty(read));
          }
        }
      }
      if (SETS > 1) {
        read = turn.stage;
      } else if (lane_index == 0) {
        barrier_arrive(ring.empty(turn.stage));
      }
      nth += SLICES;
      k += SLICES * STAGE_K;
      turn.advance(SLICES);
    }
  }
  products_wait<0>();
  if (SETS > 1 && read >= 0 && lane_index == 0) {
    barrier_arrive(ring.empty(read));
  }
}

template <
    int FRAGMENTS_M,
    int SIMDGROUPS_N,
    int SIMDGROUPS_K,
    int STAGES,
    bool WHOLE,
    bool BATCHED,
    typename W,
    typename T,
    typename S,
    typename O,
    typename E>
METAL_FUNC void wgmma(
    const T* x,
    const uint* w,
    const S* scales,
    const S* biases,
    const int* shape,
    const int* schedule,
    O out,
    E epilogue,
    float* shared) {
  constexpr int TILE_M = FRAGMENT_ROWS * FRAGMENTS_M;
  constexpr int COLUMNS = (SIMDGROUPS_N + WARPGROUP - 1) / WARPGROUP;  // of warpgroups
  constexpr int MULTIPLIERS = WARPGROUP * COLUMNS * SIMDGROUPS_K;
  constexpr int SIMDGROUPS = MULTIPLIERS + LOADERS;
  const Work work = read_work(shape, schedule);
  const Range range = range_of_threadgroup<WHOLE>(blockIdx.x, work);
  const int warp = warp_of_thread(threadIdx.x);
  const int lane_index = threadIdx.x % 32;
  const Lane lane = lane_of(lane_index);
  const int column = warp / WARPGROUP % COLUMNS * WARPGROUP + warp % WARPGROUP;
  const int slice = warp / WARPGROUP / COLUMNS;
  const Ring<FRAGMENTS_M, STAGES> ring = {shared_at(shared)};
  float* scratch = shared + BARRIERS_BYTES / 4;  // takes turns with the stages
  float* own = scratch + (column * SIMDGROUPS_K + slice) * TILE_M * SCRATCH_ROW;
  const bool aligned = is_aligned(x) && is_aligned(w) && is_aligned(scales);
  if (threadIdx.x == 0) {
    UNROLL for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full(i), pieces_of_stage<FRAGMENTS_M>());
      barrier_init(ring.empty(i), WARPGROUP * COLUMNS);
    }
    barriers_ready();
  }
  __syncthreads();
  uint first = 0;  // stages of the splits before
  for (uint position = range.begin; position < range.end;) {
    Split split = split_at<1, WHOLE, W::GROUP, BATCHED>(
        position, range.end, blockIdx.x, narrowed<SIMDGROUPS_N>(work));
    split.col *= SIMDGROUPS_N;
    const InOrder order = rows_of_product<BATCHED>(split, work);
    position += split.k_tile_count;
    const int col = split.col + TILE_N * column;
    const bool has_columns = column < SIMDGROUPS_N && col < work.n;
    const WeightTile<S> tile = weight_tile<W>(
        w, scales, biases, has_columns ? col : split.col, work, lane, split.product);
    float totals[2][FRAGMENTS_M][4] = {};
    if (warp >= MULTIPLIERS) {
      const int loader = warp - MULTIPLIERS;
      if (aligned) {
        fill_stages<FRAGMENTS_M, STAGES, W, true>(
            ring, first, x, order, work, split, loader, lane_index);
      } else {
        fill_stages<FRAGMENTS_M, STAGES, W, false>(
            ring, first, x, order, work, split, loader, lane_index);
      }
    } else if (aligned) {
      multiply_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, true, T>(
          totals, ring, first, tile, has_columns, work, split, slice, lane_index);
    } else {
      multiply_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, false, T>(
          totals, ring, first, tile, has_columns, work, split, slice, lane_index);
    }
    first += ceil_div(split.k_stop - split.k_start, STAGE_K);
    __syncthreads();
    if (warp < MULTIPLIERS && has_columns) {
      store_sums<FRAGMENTS_M, W>(own, totals, tile);
    }
    __syncthreads();
    store_tile<TILE_M, SIMDGROUPS_N * SIMDGROUPS_K, SIMDGROUPS_N, SIMDGROUPS>(
        out, epilogue, order, scratch, work, split, SIMDGROUPS_K, warp, lane_index);
    if (WHOLE) {
      break;
    }
    __syncthreads();
  }
}
