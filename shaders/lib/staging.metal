// Stages weights and activations in threadgroup memory, as the fragments that are multiplied.
//
// A pipeline stage has a chunk of w for each of the SIMDGROUPS_K simdgroups along k and n, one
// step of k of 32 rows, and the activations of the same k. With b buffers, stage s is in buffer
// s % b. It is prefetched b - 1 stages before it is multiplied, into the buffer of the stage
// that was just multiplied; `phases` in staging.py models the same schedule.
//
// BUFFERS  stages in threadgroup memory, 1 to 3
// LOADERS  simdgroups that only load and decode; 0: all simdgroups load and multiply
// BYTES    of a staged value, which has the type of fragments of activations
//
// L        Tiling
// W        WeightFormat

template <int BUFFERS_, int LOADERS_, int BYTES, typename L, typename W_>
struct Staging : L {
  typedef W_ W;
  STATIC int BUFFERS = BUFFERS_;
  STATIC int LOADERS = LOADERS_;
  STATIC int MULTIPLYING = L::SIMDGROUPS;
  STATIC int LOADING = LOADERS > 0 ? LOADERS : MULTIPLYING;
  // Elements of 32 rows of w in a step, of 8 rows of x in a step, of w in a stage, and of a
  // stage.
  STATIC int CHUNK = TILE_N * W::STEP;
  STATIC int COLUMN = 8 * W::STEP;
  STATIC int WEIGHTS = L::SIMDGROUPS_K * CHUNK;
  STATIC int STAGE = WEIGHTS + L::SIMDGROUPS_K * L::TILE_M * W::STEP;
  // The buffers and the epilogue's scratch share the same memory. Sizes are in floats.
  STATIC int STAGES = BUFFERS * STAGE * BYTES / 4;
  STATIC int FLOATS = STAGES > L::SCRATCH ? STAGES : L::SCRATCH;
};

template <typename W, typename F, typename S>
METAL_FUNC void stage_weights(threadgroup F* chunk, WeightTile<S> tile, uint k, int lane_index) {
  uint words[words_of_step<W>()];
  load_words<W>(words, tile, k, lane_index);
  GroupParams params = {float4(1.0f), float4(0.0f)};
  if (W::FRAGMENT >= HALF_WEIGHTS) {
    params = load_group_params<W>(tile, k);
  }
  UNROLL for (int i = 0; i < 4 * W::PAIRS; ++i) {
    const int f = i / W::PAIRS;
    const simdgroup_matrix<F, 8, 8> rows =
        row_fragment<W, F>(
            words, f, i % W::PAIRS, params.scale[f], params.bias[f]);
    simdgroup_store(rows, chunk + 64 * i, 8);
  }
}

// Stages 8 rows of x as fragments [step].
template <typename W, typename F, typename T>
METAL_FUNC void stage_activations(
    threadgroup F* column, const device T* x, int first_row, int k, Work work, int lane_index) {
  constexpr int VEC4S = W::VEC4S;
  const Lane lane = lane_of(lane_index);
  vec<F, 4> x_vec4[2 * VEC4S];
  UNROLL for (int i = 0; i < 2 * VEC4S; ++i) {
    // Rows past the end read the last row; their results are never stored.
    const int row = min(first_row + 2 * lane.pair + i / VEC4S, work.m - 1);
    x_vec4[i] = vec<F, 4>(load_vec4(
        x + vec4_offset<W>(0, i % VEC4S), row * work.k + k + vec4_offset<W>(lane.row, 0)));
  }
  simdgroup_matrix<F, 8, 8> columns[W::PAIRS];
  make_columns<1, VEC4S, F>(columns, x_vec4);
  UNROLL for (int step = 0; step < W::PAIRS; ++step) {
    simdgroup_store(columns[step], column + 64 * step, 8);
  }
}

// Returns the first k of a slice's step in a stage.
template <typename W>
METAL_FUNC int step_of_stage(int stage, int k_slice, Split split, Place place) {
  return split.k_start + W::STEP * (stage * place.k_slices + k_slice);
}

// Loads one simdgroup's share of a stage. The pieces of a stage are the chunks of w, followed
// by the fragments of x.
template <typename L, typename F, typename T, typename S>
METAL_FUNC void load_stage(
    threadgroup F* buffers,
    const device T* x,
    Weights<S> weights,
    int stage,
    Work work,
    Split split,
    Place place,
    int loader,
    int lane_index) {
  typedef typename L::W W;
  threadgroup F* buffer = buffers + stage % L::BUFFERS * L::STAGE;
  // Fragments entirely past the last row are not loaded.
  const int fragments = ceil_div(min(L::TILE_M, work.m - split.row), 8);
  const int pieces = L::SIMDGROUPS_K + fragments * place.k_slices;
  for (int piece = loader; piece < pieces; piece += L::LOADING) {
    const bool is_weight = piece < L::SIMDGROUPS_K;
    const int nth = is_weight ? piece : piece - L::SIMDGROUPS_K;
    const int k = step_of_stage<W>(stage, nth % place.k_slices, split, place);
    if (k >= split.k_stop) {  // a split may have fewer stages than there are buffers
      continue;
    }
    if (is_weight) {
      const int col = split.col + TILE_N * (nth / place.k_slices);
      const WeightTile<S> tile = weight_tile<W>(
          weights, col, work, lane_index);
      stage_weights<W>(buffer + nth * L::CHUNK, tile, k, lane_index);
    } else {
      const int row = split.row + 8 * (nth / place.k_slices);
      threadgroup F* column = buffer + L::WEIGHTS + nth * L::COLUMN;
      stage_activations<W>(column, x, row, k, work, lane_index);
    }
  }
}
