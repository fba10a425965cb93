// Quantized product through threadgroup memory: weights are decoded once for all simdgroups of
// a threadgroup. The arithmetic is that of gemm_register: staged codes are exact, and scale and
// bias are applied once per group, in float32.
//
// L  Staging

// A chunk of w in threadgroup memory: fragments [f][step].
template <typename F>
struct StagedCodes {
  const threadgroup F* fragments;
};

template <typename W, typename V>
METAL_FUNC simdgroup_matrix<V, 8, 8> row_fragment(StagedCodes<V> codes, int f, int step, float, float) {
  simdgroup_matrix<V, 8, 8> rows;
  simdgroup_load(rows, codes.fragments + 64 * (f * W::PAIRS + step), 8);
  return rows;
}

// Adds the products of a stage to the totals of one simdgroup, for FRAGMENTS fragments of x.
template <int FRAGMENTS, typename L, typename F, typename S>
METAL_FUNC void multiply_stage(
    thread float2* totals,
    const threadgroup F* buffers,
    int stage,
    WeightTile<S> tile,
    int cols,
    Place place,
    int k) {
  typedef typename L::W W;
  const threadgroup F* buffer = buffers + stage % L::BUFFERS * L::STAGE;
  simdgroup_matrix<F, 8, 8> columns[W::PAIRS * FRAGMENTS];
  float2 sums[FRAGMENTS];
  UNROLL for (int j = 0; j < FRAGMENTS; ++j) {
    const int nth = (place.row / 8 + j) * place.k_slices + place.k_slice;
    const threadgroup F* column = buffer + L::WEIGHTS + nth * L::COLUMN;
    sums[j] = float2(0.0f);
    UNROLL for (int step = 0; step < W::PAIRS; ++step) {
      const int i = step * FRAGMENTS + j;
      simdgroup_load(columns[i], column + 64 * step, 8);
      sums[j] += float2(columns[i].thread_elements()[0], columns[i].thread_elements()[1]);
    }
    if (needs_sums<W>()) {
      sums[j] = float2(sum_over_rows(sums[j].x), sum_over_rows(sums[j].y));
    }
  }
  GroupParams params = {float4(1.0f), float4(0.0f)};
  if (W::FRAGMENT < HALF_WEIGHTS) {  // otherwise the staged values are scaled weights
    params = load_group_params<W>(tile, k);
  }
  const int nth = place.column * place.k_slices + place.k_slice;
  const StagedCodes<F> codes = {buffer + nth * L::CHUNK};
  add_products<FRAGMENTS, W, F>(
      totals, codes, columns, sums, params, tile.weight_scale, cols);
}

template <typename L, typename T, typename S, typename O, typename E>
METAL_FUNC void gemm_staged(
    const device T* x,
    Weights<S> weights,
    Work work,
    device O* out,
    E epilogue,
    Simdgroup simdgroup) {
  typedef typename L::W W;
  typedef typename Operands<T, W::TYPES>::Activation F;
  constexpr int FRAGMENTS_M = L::ROWS / 8;
  constexpr int AHEAD = L::BUFFERS - 1;

  const Lane lane = lane_of(simdgroup.lane_index);
  const Place place = place_of_simdgroup<L::SIMDGROUPS_M, L::SIMDGROUPS_K, L::TILES_N>(
      simdgroup.index, simdgroup.threadgroup_index < work.whole, L::ROWS);
  const bool multiplies = simdgroup.index < L::MULTIPLYING;
  const bool loads = L::LOADERS == 0 || !multiplies;
  const int loader = simdgroup.index - (L::LOADERS == 0 ? 0 : L::MULTIPLYING);
  const int corner = (simdgroup.index / L::SIMDGROUPS_M * L::TILE_M + place.row + 2 * lane.pair) *
          SCRATCH_ROW + lane.row;
  threadgroup F* buffers = (threadgroup F*)simdgroup.scratch;
  float2 totals[4 * FRAGMENTS_M];

  Splits<L, L::TILES_N, W::GROUP> splits = {work, simdgroup.threadgroup_index};
  while (splits.remain()) {
    const Split split = splits.next();
    const int col = split.col + TILE_N * place.column;
    const WeightTile<S> tile =
        weight_tile<W>(weights, col, work, simdgroup.lane_index);
    const int cols = work.n - col;
    const int rows = multiplies ? work.m - split.row - place.row : 0;
    const int stages = ceil_div(split.k_stop - split.k_start, W::STEP * place.k_slices);
    UNROLL for (int i = 0; i < 4 * FRAGMENTS_M; ++i) {
      totals[i] = float2(0.0f);
    }
    for (int stage = 0; loads && stage < AHEAD; ++stage) {
      load_stage<L>(buffers, x, weights, stage, work, split, place, loader, simdgroup.lane_index);
    }
    if (AHEAD > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int stage = 0; stage < stages; ++stage) {
      if (loads) {
        load_stage<L>(
            buffers, x, weights, stage + AHEAD, work, split, place, loader, simdgroup.lane_index);
      }
      if (AHEAD == 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      const int k = step_of_stage<W>(stage, place.k_slice, split, place);
      // Fragments entirely past the last row or column are not computed.
      if (k < split.k_stop && rows > 8 * (FRAGMENTS_M - 1)) {
        multiply_stage<FRAGMENTS_M, L>(
            totals, buffers, stage, tile, cols, place, k);
      } else if (k < split.k_stop && rows > 0) {
        multiply_stage<1, L>(totals, buffers, stage, tile, cols, place, k);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (rows > 8 * (FRAGMENTS_M - 1)) {
      write_scratch<FRAGMENTS_M>(simdgroup.scratch, totals, corner);
    } else if (rows > 0) {
      write_scratch<1>(simdgroup.scratch, totals, corner);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_tile<L::TILE_M, L::SIMDGROUPS_K, L::TILES_N, L::MULTIPLYING + L::LOADERS>(
        out,
        epilogue,
        IdentityRows{},
        simdgroup.scratch,
        work,
        split,
        place.k_slices,
        simdgroup.index,
        simdgroup.lane_index);
    if (splits.done()) {
      break;
    }
  }
}
