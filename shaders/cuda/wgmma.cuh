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

constexpr int FRAGMENT_ROWS = 8;
constexpr int STAGE_K = 128;
constexpr int HALVES = STAGE_K / TILE_K;
constexpr int LOADERS = 4;    // warps that fill stages
constexpr int WARPGROUP = 4;  // warps
constexpr int BARRIER_BYTES = 8;
// Of the barriers, at the beginning of shared memory: room for 16 stages.
constexpr int BARRIERS_BYTES = 256;

template <int FRAGMENTS>
METAL_FUNC constexpr int stage_bytes() {
  return FRAGMENTS * FRAGMENT_ROWS * STAGE_K * 2;
}

// A place in the ring of stages, and how often it was passed.
template <int STAGES>
struct Turn {
  int stage;
  uint parity;

  METAL_FUNC Turn(uint first) : stage(first % STAGES), parity(first / STAGES & 1) {
  }
  METAL_FUNC void advance(int stages) {
    stage += stages;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

// The ring as both sides see it.
template <int FRAGMENTS, int STAGES>
struct Ring {
  Shared barriers;

  METAL_FUNC Shared full(int stage) const {
    return barriers + stage * BARRIER_BYTES;
  }
  METAL_FUNC Shared empty(int stage) const {
    return barriers + (STAGES + stage) * BARRIER_BYTES;
  }
  METAL_FUNC Shared at(int stage) const {
    return barriers + BARRIERS_BYTES + stage * stage_bytes<FRAGMENTS>();
  }
};

// The values that a lane has of a row in one step, and whether they are in the row: what pads a
// weight is multiplied by zeros.
template <typename W>
METAL_FUNC int first_of_step(int k, int step, Lane lane) {
  return k + step * W::STEP + W::CODES * lane.pair;
}

template <typename W>
METAL_FUNC bool is_inside(int k, int step, Work work, Lane lane) {
  return first_of_step<W>(k, step, lane) + W::CODES <= work.k;
}

// What a lane loads of x for one fragment and 64 values of k, in the order of its codes. Beyond the
// end of a row it loads others: a load that depends on something would wait.
template <typename W, bool ALIGNED, typename T>
METAL_FUNC void load_tile_of_x(uint* run, const T* row, int k, Work work, Lane lane) {
  constexpr int REGISTERS = Run<W>::REGISTERS;
  UNROLL for (int step = 0; step < TILE_K / W::STEP; ++step) {
    const int own = min(first_of_step<W>(k, step, lane), work.k - W::CODES);
    load_activations<REGISTERS, ALIGNED>(run + step * REGISTERS, row + own);
  }
}

// Stores it as matrices of 8 rows and 8 slots, 128 bytes each, those of a product's other
// fragments beside it.
template <int FRAGMENTS, typename W>
METAL_FUNC void store_tile_of_x(
    Shared stage, const uint* run, int k, int half, int fragment, Work work, Lane lane) {
  constexpr int PRODUCTS = W::PAIRS / 2;
  UNROLL for (int product = 0; product < TILE_K / 16; ++product) {
    const int step = product / PRODUCTS;
    const bool inside = is_inside<W>(k, step, work, lane);
    uint columns[2];
    columns_of_run<W>(columns, run + step * Run<W>::REGISTERS, product % PRODUCTS);
    UNROLL for (int i = 0; i < 2; ++i) {
      const int matrix = (half * (TILE_K / 8) + 2 * product + i) * FRAGMENTS + fragment;
      store_word(stage, matrix * 32 + 4 * lane.row + lane.pair, inside ? columns[i] : 0);
    }
  }
}

// Pieces of a stage, which loaders take in turn. Of so many rows that the registers of a whole one
// would not do, halves.
template <int FRAGMENTS>
METAL_FUNC constexpr int pieces_of_stage() {
  return FRAGMENTS <= 3 ? 1 : HALVES;
}

// One split's x, as far as one loader brings it. It has one piece on the way: of several, it would
// wait for the last one's loads as well. A place in shared memory is always the same loader's, so
// that none can be a turn ahead of another. Nor must a slice be a turn ahead of a place that it
// takes over from another slice, because a parity tells only neighbouring turns apart: stages are
// full one after the other then.
template <int FRAGMENTS, int SLICES, int STAGES, typename W, bool ALIGNED, typename T>
METAL_FUNC void fill_stages(
    Ring<FRAGMENTS, STAGES> ring,
    uint first,
    const T* x,
    InOrder order,
    Work work,
    Split split,
    int loader,
    int lane_index) {
  constexpr int PIECES = pieces_of_stage<FRAGMENTS>();
  constexpr int PIECE_HALVES = HALVES / PIECES;
  static_assert(STAGES * PIECES % LOADERS == 0, "a place has one loader");
  const Lane lane = lane_of(lane_index);
  const int stages = ceil_div(split.k_stop - split.k_start, STAGE_K);
  uint rows[FRAGMENTS];
  UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
    // Rows past the end read the last row: their results are never stored.
    const uint row = min(split.row + FRAGMENT_ROWS * i + lane.row, work.m - 1);
    rows[i] = input_row(order, row) * work.k;
  }
  for (int piece = loader; piece < stages * PIECES; piece += LOADERS) {
    const int nth = piece / PIECES;
    const int half = piece % PIECES * PIECE_HALVES;
    const int k = split.k_start + nth * STAGE_K + half * TILE_K;
    uint runs[PIECE_HALVES][FRAGMENTS][TILE_K / 8];
    UNROLL for (int h = 0; h < PIECE_HALVES; ++h) {
      UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
        load_tile_of_x<W, ALIGNED>(runs[h][i], x + rows[i], k + h * TILE_K, work, lane);
      }
    }
    const Turn<STAGES> turn(first + nth);
    if (first + nth >= STAGES) {
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
    }
    UNROLL for (int h = 0; h < PIECE_HALVES; ++h) {
      UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
        store_tile_of_x<FRAGMENTS, W>(
            ring.at(turn.stage), runs[h][i], k + h * TILE_K, half + h, i, work, lane);
      }
    }
    stores_visible();
    if (STAGES % SLICES != 0 && nth > 0) {
      const Turn<STAGES> before(first + nth - 1);
      barrier_wait(ring.full(before.stage), before.parity);
    }
    warp_sync();
    if (lane_index == 0) {
      barrier_arrive(ring.full(turn.stage));
    }
  }
}

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
        fill_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, true>(
            ring, first, x, order, work, split, loader, lane_index);
      } else {
        fill_stages<FRAGMENTS_M, SIMDGROUPS_K, STAGES, W, false>(
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
