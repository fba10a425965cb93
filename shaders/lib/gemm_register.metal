// Weights are loaded from device memory to registers and multiplied there as 8x8 fragments: the
// main loop has no staging, no barrier and no conversion. Fragments hold what W::FRAGMENT says.
// Scale and bias are applied once to the sums of a group, in float32.
//
// L  Tiling; a simdgroup has 8 or 16 rows of x, which are one or two column fragments; or three,
//    if each tile has more than 16 rows
// W  WeightFormat

// Main loop of one simdgroup: its steps of one split, for FRAGMENTS fragments of x.
template <int FRAGMENTS, typename W, typename T, typename S, typename R>
METAL_FUNC void accumulate(
    thread float2* totals,
    const device T* x,
    R row_map,
    WeightTile<S> tile,
    int first_row,
    int cols,
    Work work,
    Split split,
    Place place,
    int lane_index) {
  typedef typename Operands<T, W::TYPES>::Activation F;
  typedef typename Operands<T, W::TYPES>::Weight V;
  constexpr int VEC4S = W::VEC4S;
  constexpr int COLUMNS = 2 * FRAGMENTS;
  const Lane lane = lane_of(lane_index);
  uint starts[COLUMNS];
  UNROLL for (int i = 0; i < COLUMNS; ++i) {
    // Rows past the end read the last row; their results are never stored.
    const int row = min(first_row + 8 * (i / 2) + 2 * lane.pair + i % 2, work.m - 1);
    starts[i] = input_row(row_map, row) * work.k + vec4_offset<W>(lane.row, 0);
  }
  UNROLL for (int i = 0; i < 4 * FRAGMENTS; ++i) {
    totals[i] = float2(0.0f);
  }
  for (int k = first_step(split, place); k < split.k_stop; k = next_step<W::STEP>(k, place)) {
    uint words[words_of_step<W>()];
    vec<F, 4> x_vec4[COLUMNS * VEC4S];
    float2 sums[FRAGMENTS];
    const GroupParams params =
        load_step<COLUMNS, W, F>(words, x_vec4, tile, x, starts, k, lane_index);
    if (needs_sums<W>()) {
      sum_activations<FRAGMENTS, VEC4S>(sums, x_vec4);
    }
    simdgroup_matrix<F, 8, 8> columns[4 * VEC4S * FRAGMENTS];
    make_columns<FRAGMENTS, VEC4S, F>(columns, x_vec4);
    add_products<FRAGMENTS, W, V>(
        totals, words, columns, sums, params, tile.weight_scale, cols);
  }
}

template <typename L, typename W, typename T, typename S, typename O, typename E>
METAL_FUNC void gemm_register(
    const device T* x,
    Weights<S> weights,
    Work work,
    device O* out,
    E epilogue,
    Simdgroup simdgroup) {
  constexpr int FRAGMENTS_M = L::ROWS / 8;
  typedef WeightRows<E, L::TILES_N> R;
  const Lane lane = lane_of(simdgroup.lane_index);
  const Place place = place_of_simdgroup<L::SIMDGROUPS_M, L::SIMDGROUPS_K, L::TILES_N>(
      simdgroup.index, simdgroup.threadgroup_index < work.whole, L::ROWS);
  const int corner = (simdgroup.index / L::SIMDGROUPS_M * L::TILE_M + place.row + 2 * lane.pair) *
          SCRATCH_ROW + lane.row;
  float2 totals[4 * FRAGMENTS_M];

  Splits<L, R::WIDTH, W::GROUP> splits = {work, simdgroup.threadgroup_index};
  while (splits.remain()) {
    const Split split = splits.next();
    const IdentityRows row_map = rows_of_product<L::BATCHED>(split, work);
    const int col = R::first(split, place, work);
    const Work weight = R::sizes(work);
    const WeightTile<S> tile =
        weight_tile<W>(weights, col, weight, simdgroup.lane_index, split.product);
    const int cols = weight.n - col;
    const int row = split.row + place.row;
    // Fragments entirely past the last row or column are not computed.
    if (work.m - row > 8 * (FRAGMENTS_M - 1)) {
      accumulate<FRAGMENTS_M, W>(
          totals, x, row_map, tile, row, cols, work, split, place, simdgroup.lane_index);
      write_scratch<FRAGMENTS_M>(simdgroup.scratch, totals, corner);
    } else if (work.m > row) {
      accumulate<1, W>(
          totals, x, row_map, tile, row, cols, work, split, place, simdgroup.lane_index);
      write_scratch<1>(simdgroup.scratch, totals, corner);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_tile<L::TILE_M, L::SIMDGROUPS_K, R::WIDTH, L::SIMDGROUPS>(
        out,
        epilogue,
        row_map,
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
