// Main loop of a warp, as mma.cuh and gather.cuh have it: weights are prefetched from device memory
// into registers and multiplied there as 16x8x16 fragments. It has no staging and no barrier, so
// warps do not wait for each other. docs/lab has the measurements.

// Number of tiles that are prefetched; register pressure limits it.
template <typename W>
METAL_FUNC constexpr int tiles_ahead() {
  return THREADS > 512 || W::BITS > 4 ? 1 : 2;
}

// Words of a lane for 64 values of k.
template <typename W>
METAL_FUNC constexpr int words_of_tile() {
  return words_of_step<W>() * (TILE_K / W::STEP);
}

template <typename W, bool ALIGNED, typename S>
METAL_FUNC void load_tile(uint* words, const WeightTile<S>& tile, int k, int k_stop, Work work) {
  UNROLL for (int i = 0; i < TILE_K / W::STEP; ++i) {
    if (W::STEP == TILE_K || k + i * W::STEP < k_stop) {
      load_words<W, ALIGNED>(words + i * words_of_step<W>(), tile, k + i * W::STEP, work);
    }
  }
}

template <typename W, bool ALIGNED, typename S>
METAL_FUNC void load_groups(
    Numbers<W, S>* numbers, const WeightTile<S>& tile, int k, int k_stop, Work work) {
  UNROLL for (int i = 0; i < groups_of_tile<W>(); ++i) {
    if (i == 0 || k + i * W::STEP < k_stop) {
      numbers[i] = load_numbers<W, ALIGNED>(tile, k + i * W::STEP, work);
    }
  }
}

// Adds the products of one step.
template <int FRAGMENTS, typename W, typename T>
METAL_FUNC void multiply_step(
    float (*totals)[FRAGMENTS][4],
    const uint* words,
    const uint (*x_values)[XValues<W>::REGISTERS],
    const GroupParams<T>& params) {
  UNROLL for (int j = 0; j < W::PAIRS / 2; ++j) {
    uint rows[2][4];
    UNROLL for (int i = 0; i < 8; ++i) {
      rows[i / 4][i % 4] = weights<W>(words, i / 4 * 2 + i % 2, 2 * j + i % 4 / 2, params);
    }
    UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
      uint columns[2];
      columns_of_x<W>(columns, x_values[i], j);
      multiply(totals[0][i], rows[0], columns, T());
      multiply(totals[1][i], rows[1], columns, T());
    }
  }
}

// Main loop of one warp: k from `k` to k_stop, both multiples of a k tile.
template <int FRAGMENTS, typename W, bool ALIGNED, typename T, typename P, typename S>
METAL_FUNC void accumulate(
    float (*totals)[FRAGMENTS][4],
    const P* x,
    const WeightTile<S>& tile,
    int k,
    int k_stop,
    Work work) {
  constexpr int AHEAD = tiles_ahead<W>();
  constexpr int STEPS = TILE_K / W::STEP;
  // A group of 128 spans two tiles of 64, so its numbers are loaded for every second tile.
  constexpr int GROUP_TILES = W::GROUP == 128 ? 2 : 1;
  constexpr int GROUPS = groups_of_tile<W>();
  uint words[AHEAD][words_of_tile<W>()];
  GroupParams<T> params[GROUPS];
  Numbers<W, S> next[GROUPS];
  if (k < k_stop) {
    load_groups<W, ALIGNED>(next, tile, k, k_stop, work);
  }
  UNROLL for (int ahead = 0; ahead < AHEAD; ++ahead) {
    if (k + ahead * TILE_K < k_stop) {
      load_tile<W, ALIGNED>(words[ahead], tile, k + ahead * TILE_K, k_stop, work);
    }
  }
  for (; k < k_stop; k += 2 * TILE_K) {
    UNROLL for (int nth = 0; nth < 2; ++nth) {
      const int here = k + nth * TILE_K;
      if (GROUP_TILES == 1 && here >= k_stop) {
        break;
      }
      if (nth % GROUP_TILES == 0) {
        UNROLL for (int i = 0; i < GROUPS; ++i) {
          params[i] = group_params_of<W, T>(next[i]);
        }
        if (here + GROUP_TILES * TILE_K < k_stop) {
          load_groups<W, ALIGNED>(next, tile, here + GROUP_TILES * TILE_K, k_stop, work);
        }
      }
      uint x_values[STEPS][FRAGMENTS][XValues<W>::REGISTERS];
      UNROLL for (int step = 0; step < STEPS; ++step) {
        if (STEPS == 1 || here + step * W::STEP < k_stop) {
          UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
            load_activations<XValues<W>::REGISTERS, ALIGNED>(x_values[step][i], x[i] + here + step * W::STEP);
          }
        }
      }
      UNROLL for (int step = 0; step < STEPS; ++step) {
        if (STEPS == 1 || here + step * W::STEP < k_stop) {
          multiply_step<FRAGMENTS, W>(
              totals,
              words[nth % AHEAD] + step * words_of_step<W>(),
              x_values[step],
              params[GROUPS == 1 ? 0 : step]);
        }
      }
      if (here + AHEAD * TILE_K < k_stop) {
        load_tile<W, ALIGNED>(words[nth % AHEAD], tile, here + AHEAD * TILE_K, k_stop, work);
      }
    }
  }
}

// Stores a warp's totals in its scratch.
template <int FRAGMENTS, typename W, typename S>
METAL_FUNC void store_sums(
    float* scratch, const float (*totals)[FRAGMENTS][4], const WeightTile<S>& tile) {
  const float weight_scale = W::GLOBAL ? global_scale(tile.biases) : 1.0f;
  UNROLL for (int i = 0; i < 8 * FRAGMENTS; ++i) {
    const float total = totals[i / 4 / FRAGMENTS][i / 4 % FRAGMENTS][i % 4];
    scratch[index_of_sum(tile.lane, i / 4 / FRAGMENTS, i / 4 % FRAGMENTS, i % 4)] =
        W::GLOBAL ? total * weight_scale : total;
  }
}

// Computes one warp's part of a split into its scratch.
template <int FRAGMENTS, int SLICES, typename W, bool ALIGNED, typename R, typename L, typename S>
METAL_FUNC void multiply_split(
    float* scratch,
    R x,
    L row_map,
    const WeightTile<S>& tile,
    Work work,
    Split split,
    int slice) {
  constexpr int K_TILE = k_tile_of_group(W::GROUP);
  decltype(row_of(x, 0, work)) rows[FRAGMENTS];
  UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
    // Rows past the end read the last row; their results are never stored.
    const uint row = min(split.row + 8 * i + tile.lane.row, work.m - 1);
    rows[i] = row_of(x, input_row(row_map, row), work) + W::CODES * tile.lane.pair;
  }
  float totals[2][FRAGMENTS][4];
  UNROLL for (int i = 0; i < 8 * FRAGMENTS; ++i) {
    totals[i / 4 / FRAGMENTS][i / 4 % FRAGMENTS][i % 4] = 0.0f;
  }
  const int k = split.k_start + split.k_tile_count * slice / SLICES * K_TILE;
  const int k_stop = split.k_start + split.k_tile_count * (slice + 1) / SLICES * K_TILE;
  accumulate<FRAGMENTS, W, ALIGNED, typename R::Type>(
      totals, rows, tile, k, min(k_stop, split.k_stop), work);
  store_sums<FRAGMENTS, W>(scratch, totals, tile);
}

// Selects the main loop for aligned or for unaligned arrays.
template <int FRAGMENTS, int SLICES, typename W, typename R, typename L, typename S>
METAL_FUNC void multiply_split(
    float* scratch,
    R x,
    L row_map,
    const WeightTile<S>& tile,
    Work work,
    Split split,
    int slice,
    bool aligned) {
  if (aligned) {
    multiply_split<FRAGMENTS, SLICES, W, true>(scratch, x, row_map, tile, work, split, slice);
  } else {
    multiply_split<FRAGMENTS, SLICES, W, false>(scratch, x, row_map, tile, work, split, slice);
  }
}
