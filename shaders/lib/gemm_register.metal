// Weights go from device memory to registers and from there into 8x8 multiply-accumulates:
// no staging, no barrier in the main loop, no convert. Codes stay codes: a group's products
// are summed with 64 + q, its scale and bias follow once, in float32.
//
// FRAGMENTS_M   column fragments (of 8 rows of x) of a simdgroup, 1 or 2
// SIMDGROUPS_M  simdgroups side by side in m, on the same words
// SIMDGROUPS_K  simdgroups that take turns at the k tiles
// SUBTRACT      q instead of 64 + q enters the multiply: more exact, and slightly slower
// WIDEN         weight fragments become float too where the activations are float

template <typename F, bool WIDEN>
struct WeightFragment {
  typedef half type;
};
template <typename F>
struct WeightFragment<F, true> {
  typedef F type;
};

template <typename F>
METAL_FUNC simdgroup_matrix<F, 8, 8> fragment(F first, F second) {
  simdgroup_matrix<F, 8, 8> result;
  result.thread_elements()[0] = first;
  result.thread_elements()[1] = second;
  return result;
}

// Everything that one step reads: words, activations, scales and biases.
// runs[column * RUNS + h]: four consecutive activations of each of the lane's columns.
template <int COLUMNS, int GROUP, bool PACKED, bool ALIGNED, typename T, typename S, typename Run>
METAL_FUNC Quantizers load_step(
    thread uint4* words,
    thread Run* runs,
    WeightTile<S> tile,
    const device T* x,
    thread const int* rows,
    int lane_row,
    int k) {
  constexpr int RUNS = runs_of_group(GROUP);
  load_words<GROUP, PACKED, ALIGNED>(words, tile, k);
  UNROLL for (int i = 0; i < COLUMNS * RUNS; ++i) {
    const int offset = k + run_offset<GROUP, PACKED>(lane_row, i % RUNS);
    runs[i] = load_run<ALIGNED>(x + rows[i / RUNS] + offset);
  }
  return load_quantizers<GROUP, PACKED, ALIGNED>(tile, k);
}

// The sum of x over the step's k, of the lane's two columns of each fragment.
template <int FRAGMENTS_M, int RUNS, typename Run>
METAL_FUNC void sum_activations(thread float2* sums, thread const Run* runs) {
  UNROLL for (int column = 0; column < 2 * FRAGMENTS_M; ++column) {
    sums[column / 2][column % 2] = sum_over_rows(sum_of_runs<RUNS>(runs + column * RUNS));
  }
}

// products[f * FRAGMENTS_M + j] = codes of row fragment f times activations of fragment j.
template <int FRAGMENTS_M, int RUNS, bool SUBTRACT, bool WIDEN, typename F>
METAL_FUNC void multiply(
    thread simdgroup_matrix<float, 8, 8>* products,
    thread const uint4* words,
    thread const vec<F, 4>* runs,
    thread const float2* sums) {
  typedef typename WeightFragment<F, WIDEN>::type W;
  UNROLL for (int i = 0; i < 4 * FRAGMENTS_M; ++i) {
    // Every code counts 64 too much: -64 * sum(x) is where the sum begins.
    const float2 start = SUBTRACT ? float2(0.0f) : -CODE_OFFSET * sums[i % FRAGMENTS_M];
    products[i] = fragment<float>(start.x, start.y);
  }
  UNROLL for (int step = 0; step < 4 * RUNS; ++step) {
    const int h = step / 4;
    const int s = step % 4;
    simdgroup_matrix<F, 8, 8> columns[FRAGMENTS_M];
    UNROLL for (int j = 0; j < FRAGMENTS_M; ++j) {
      columns[j] = fragment<F>(runs[2 * j * RUNS + h][s], runs[(2 * j + 1) * RUNS + h][s]);
    }
    UNROLL for (int f = 0; f < 4; ++f) {
      const half2 codes = decode<SUBTRACT>(words[h][f], s);
      simdgroup_matrix<W, 8, 8> rows = fragment<W>(W(codes.x), W(codes.y));
      UNROLL for (int j = 0; j < FRAGMENTS_M; ++j) {
        const int i = f * FRAGMENTS_M + j;
        simdgroup_multiply_accumulate(products[i], rows, columns[j], products[i]);
      }
    }
  }
}

template <int FRAGMENTS_M>
METAL_FUNC void add_scaled(
    thread float2* totals,
    thread simdgroup_matrix<float, 8, 8>* products,
    Quantizers quantizers,
    thread const float2* sums) {
  UNROLL for (int i = 0; i < 4 * FRAGMENTS_M; ++i) {
    const int f = i / FRAGMENTS_M;
    const float2 product =
        float2(products[i].thread_elements()[0], products[i].thread_elements()[1]);
    totals[i] += quantizers.scale[f] * product + quantizers.bias[f] * sums[i % FRAGMENTS_M];
  }
}

template <int FRAGMENTS_M>
METAL_FUNC void
write_scratch(threadgroup float* scratch, thread const float2* totals, int first_row, Lane lane) {
  UNROLL for (int i = 0; i < 4 * FRAGMENTS_M; ++i) {
    const int row = first_row + 8 * (i % FRAGMENTS_M) + 2 * lane.pair;
    const int col = 8 * (i / FRAGMENTS_M) + lane.row;
    scratch[row * SCRATCH_ROW + col] = totals[i].x;
    scratch[(row + 1) * SCRATCH_ROW + col] = totals[i].y;
  }
}

// The main loop of one simdgroup: its k tiles of one unit, for FRAGMENTS fragments of x.
template <int FRAGMENTS, int SIMDGROUPS_K, int GROUP, bool PACKED, bool SUBTRACT, bool WIDEN, typename T, typename S>
METAL_FUNC void accumulate(
    thread float2* totals,
    const device T* x,
    WeightTile<S> tile,
    int rows_of_x,
    int row_length,
    int k_start,
    int k_stop,
    Lane lane,
    bool aligned) {
  typedef typename Fragment<T>::type F;
  constexpr int RUNS = runs_of_group(GROUP);
  constexpr int COLUMNS = 2 * FRAGMENTS;
  int rows[COLUMNS];
  UNROLL for (int i = 0; i < COLUMNS; ++i) {
    // Rows past the end read the last row: their results are never stored.
    rows[i] = min(8 * (i / 2) + 2 * lane.pair + i % 2, rows_of_x - 1) * row_length;
  }
  UNROLL for (int i = 0; i < 4 * FRAGMENTS; ++i) {
    totals[i] = float2(0.0f);
  }
  for (int k = k_start; k < k_stop; k = next_step<GROUP, SIMDGROUPS_K>(k)) {
    uint4 words[RUNS];
    vec<F, 4> runs[COLUMNS * RUNS];
    float2 sums[FRAGMENTS];
    simdgroup_matrix<float, 8, 8> products[4 * FRAGMENTS];
    const Quantizers quantizers = aligned
        ? load_step<COLUMNS, GROUP, PACKED, true>(words, runs, tile, x, rows, lane.row, k)
        : load_step<COLUMNS, GROUP, PACKED, false>(words, runs, tile, x, rows, lane.row, k);
    sum_activations<FRAGMENTS, RUNS>(sums, runs);
    multiply<FRAGMENTS, RUNS, SUBTRACT, WIDEN, F>(products, words, runs, sums);
    add_scaled<FRAGMENTS>(totals, products, quantizers, sums);
  }
}

template <
    int FRAGMENTS_M,
    int SIMDGROUPS_M,
    int SIMDGROUPS_K,
    int GROUP,
    bool PACKED,
    bool SUBTRACT,
    bool WIDEN,
    typename T,
    typename S,
    typename O>
METAL_FUNC void gemm_register(
    const device T* x,
    const device uint32_t* w,
    const device S* scales,
    const device S* biases,
    constant int32_t* params,
    device O* out,
    threadgroup float* scratch,
    int threadgroup_index,
    int num_threadgroups,
    int simdgroup_index,
    int lane_index) {
  constexpr int TILE_M = 8 * FRAGMENTS_M * SIMDGROUPS_M;
  constexpr int THREADS = 32 * SIMDGROUPS_M * SIMDGROUPS_K;

  const Work work = read_work(params);
  const Range range = units_of_threadgroup<TILE_M>(threadgroup_index, num_threadgroups, work);
  const Lane lane = lane_of(lane_index);
  const int first_row = simdgroup_index % SIMDGROUPS_M * 8 * FRAGMENTS_M;
  const int simdgroup_k = simdgroup_index / SIMDGROUPS_M;
  const bool aligned = is_aligned(x) && is_aligned(w) && is_aligned(scales);
  float2 totals[4 * FRAGMENTS_M];

  for (int index = range.begin; index < range.end; ++index) {
    const Unit unit = unit_of_index<TILE_M, GROUP>(index, work);
    const WeightTile<S> tile =
        weight_tile<GROUP, PACKED>(w, scales, biases, unit.col, work, lane_index);
    const int rows = work.m - unit.row - first_row;
    const device T* x_tile = x + size_t(unit.row + first_row) * work.k;
    const int k_start = first_step(unit, simdgroup_k);
    const int scratch_row = simdgroup_k * TILE_M + first_row;
    // Whole fragments past the last row are left out, not computed.
    if (rows > 8 * (FRAGMENTS_M - 1)) {
      accumulate<FRAGMENTS_M, SIMDGROUPS_K, GROUP, PACKED, SUBTRACT, WIDEN>(
          totals, x_tile, tile, rows, work.k, k_start, unit.k_stop, lane, aligned);
      write_scratch<FRAGMENTS_M>(scratch, totals, scratch_row, lane);
    } else if (rows > 0) {
      accumulate<1, SIMDGROUPS_K, GROUP, PACKED, SUBTRACT, WIDEN>(
          totals, x_tile, tile, rows, work.k, k_start, unit.k_stop, lane, aligned);
      write_scratch<1>(scratch, totals, scratch_row, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_tile<TILE_M, SIMDGROUPS_K, THREADS>(
        out, scratch, work, unit, 32 * simdgroup_index + lane_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
