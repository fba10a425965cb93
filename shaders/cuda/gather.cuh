// Products of experts: many products of one row each, each with one of several weights. A block
// computes a tile of columns of one expert. It finds the rows that chose the expert, so the weight
// is read once for all of them, or not at all.
//
// BY_PAIR  a block belongs to a pair and returns if an earlier pair chose the same expert; else it
//          belongs to an expert
// EACH     consecutive pairs that have the same row of x; 0: the array `sources` has their rows
//
// L and W are those of mma.cuh.
//
// If there is a second weight, the columns of gate are followed by those of up, and a paired
// epilogue combines them.

// The rows of a tile: indices of the pairs (row of x, expert) that the block found.
template <int EACH>
struct GatheredRows {
  const int* pairs;
  const uint* sources;  // rows of x; not read unless EACH is 0
};

METAL_FUNC uint input_row(GatheredRows<0> row_map, uint row) {
  return row_map.sources[row_map.pairs[row]];
}

template <int EACH>
METAL_FUNC uint input_row(GatheredRows<EACH> row_map, uint row) {
  return uint(row_map.pairs[row]) / EACH;
}

template <int EACH>
METAL_FUNC uint output_row(GatheredRows<EACH> row_map, uint row) {
  return row_map.pairs[row];
}

template <int EACH>
METAL_FUNC uint rows_of_slot(GatheredRows<EACH>, Work work) {
  return work.m;
}

// The number of pairs of an expert, and its first pair.
struct Pairs {
  int count;
  int first;
};

// Lists up to TILE_M pairs of an expert in ascending order, beginning with pair number `first`. All
// warps count; the first one writes.
template <int TILE_M>
METAL_FUNC Pairs list_pairs(
    int* pairs, const uint* experts, int count, uint expert, int first, int warp, int lane_index) {
  Pairs found = {0, count};
  for (int base = 0; base < count; base += 32) {
    const int pair = base + lane_index;
    const bool chosen = pair < count && experts[min(pair, count - 1)] == expert;
    const uint lanes = __ballot_sync(0xffffffffu, chosen);
    const int place = found.count + __popc(lanes & ((1u << lane_index) - 1)) - first;
    if (chosen && warp == 0 && place >= 0 && place < TILE_M) {
      pairs[place] = pair;
    }
    if (lanes != 0 && found.count == 0) {
      found.first = base + __ffs(lanes) - 1;
    }
    found.count += __popc(lanes);
  }
  return found;
}

// Epilogue that adds biases [experts, n] to the product.
template <typename T>
struct Biased {
  const T* bias;
};

template <typename T>
METAL_FUNC float apply_epilogue(float value, Biased<T> epilogue, uint, uint col) {
  return value + float(epilogue.bias[col]);
}

template <typename T>
METAL_FUNC uint output_index(Biased<T>, uint row, uint col, Work work) {
  return row * work.n + col;
}

// Returns the epilogue with the biases of one expert, whose weight has n rows.
template <typename E>
METAL_FUNC E of_expert(E epilogue, uint, uint) {
  return epilogue;
}

template <typename T>
METAL_FUNC Biased<T> of_expert(Biased<T> epilogue, uint expert, uint n) {
  return {epilogue.bias + expert * n};
}

template <int ACTIVATION, typename T>
METAL_FUNC Paired<Gated<ACTIVATION, Biases<T>>> of_expert(
    Paired<Gated<ACTIVATION, Biases<T>>> epilogue, uint expert, uint n) {
  const Biases<T> all = epilogue.how.biases;
  return {{{all.gate + expert * n, all.up + expert * n}}};
}

// The weights of all experts. The arrays of the second ones are null if there are none.
template <typename S>
struct ExpertWeights {
  Weights<S> first;
  Weights<S> second;
};

template <typename S>
METAL_FUNC ExpertWeights<S> expert_weights(
    const uint* w, const S* scales, const S* biases, const uint* second, const S* second_scales) {
  return {{w, scales, biases}, {second, second_scales, biases}};
}

// The expert of each pair, and the rows of x of pairs.
struct Choices {
  const uint* experts;
  const uint* sources;
  const int* shape;  // number of pairs, n, k
};

template <
    typename L,
    bool BY_PAIR,
    int EACH,
    typename W,
    typename T,
    typename S,
    typename O,
    typename E>
METAL_FUNC void gather(
    const T* x, ExpertWeights<S> weights, Choices choices, O out, E epilogue, float* scratch) {
  constexpr int FRAGMENTS_M = L::FRAGMENTS_M;
  constexpr int SIMDGROUPS_N = L::SIMDGROUPS_N;
  constexpr int SIMDGROUPS_K = L::SIMDGROUPS_K;
  constexpr int TILE_M = L::TILE_M;
  constexpr int SIMDGROUPS = L::SIMDGROUPS;
  const int count = choices.shape[0];
  Work one;
  one.n = choices.shape[1];
  one.k = choices.shape[2];
  Work work = one;
  work.n *= weights.second.w == nullptr ? 1 : 2;
  const uint n_tiles = ceil_div(work.n, TILE_N * SIMDGROUPS_N);
  const uint own = blockIdx.x / n_tiles;  // index of the block's pair or expert
  const uint expert = BY_PAIR ? choices.experts[own] : own;
  const int warp = threadIdx.x / 32;
  const int column = warp % SIMDGROUPS_N;
  const int slice = warp / SIMDGROUPS_N;
  const int lane_index = threadIdx.x % 32;

  Split split;
  split.row = 0;
  split.col = blockIdx.x % n_tiles * (TILE_N * SIMDGROUPS_N);
  split.slot = 0;
  split.k_start = 0;
  split.k_stop = work.k;
  split.k_tile_count = ceil_div(work.k, k_tile_of_group(W::GROUP));
  const int col = column_of_warp<SIMDGROUPS_N>(epilogue, split.col, column, work);
  const Lane lane = lane_of(lane_index);
  const WeightTile<S> tile = col < one.n
                                 ? weight_tile<W>(weights.first, col, one, lane, expert)
                                 : weight_tile<W>(weights.second, col - one.n, one, lane, expert);
  const bool aligned = is_aligned(x) && is_aligned(weights.first) && is_aligned(weights.second);
  const E own_epilogue = of_expert(epilogue, expert, one.n);
  int* pairs = (int*)(scratch + SIMDGROUPS * TILE_M * SCRATCH_ROW);
  const GatheredRows<EACH> row_map = {pairs, choices.sources};
  float* sums = scratch + (column * SIMDGROUPS_K + slice) * TILE_M * SCRATCH_ROW;

  for (int first = 0, found = count; first < found; first += TILE_M) {
    const Pairs listed =
        list_pairs<TILE_M>(pairs, choices.experts, count, expert, first, warp, lane_index);
    found = listed.count;
    // All threads found the same pairs, so the branch is uniform.
    if (found == 0 || (BY_PAIR && listed.first < int(own))) {
      break;
    }
    __syncthreads();
    work.m = min(found - first, TILE_M);
    if (col < work.n) {
      const Rows<T> rows = plain_rows(x);
      multiply_split<FRAGMENTS_M, SIMDGROUPS_K, W>(
          sums, rows, row_map, tile, work, split, slice, aligned);
    }
    __syncthreads();
    store_tile<TILE_M, SIMDGROUPS, SIMDGROUPS_N, SIMDGROUPS>(
        out, own_epilogue, row_map, scratch, work, split, SIMDGROUPS_K, warp, lane_index);
    __syncthreads();
  }
}
