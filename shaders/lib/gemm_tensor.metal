// The main loop of gemm_register with Metal's tensor operations: codes are decoded to half in
// registers, and a lane has the same words, k and rows of w as in gemm_register. Scales and biases
// are applied once per group to the float32 sums of the group, so no scaled weight is rounded.
//
// L       Tiling; a simdgroup has BLOCKS blocks of 16 rows of x, the rows of an operation
// BLOCKS  1 or 2; two blocks share the decoded weights
// W       WeightFormat
//
// Rows of x enter as they are, as half or bfloat, so none is scaled or rounded.
//
// A tile is stored in two rounds per block, because its partial sums would take too much
// threadgroup memory. Round r stores the rows from 8 * SIMDGROUPS_M * r on, of which every
// simdgroup holds eight.

constant constexpr int ROUND_ROWS = 8;  // rows of a simdgroup in a round
constant constexpr int BLOCK_ROUNDS = TENSOR_ROWS / ROUND_ROWS;
constant constexpr int OPERATION_WEIGHTS = 32;  // of a lane

METAL_FUNC void load_elements(thread half* elements, const device half* x, uint offset) {
  const half4 loaded = load_vec4(x, offset);
  UNROLL for (int s = 0; s < 4; ++s) {
    elements[s] = loaded[s];
  }
}

METAL_FUNC void load_elements(thread bfloat* elements, const device bfloat* x, uint offset) {
  const ushort4 raw = load_vec4((const device ushort*)x, offset);
  UNROLL for (int s = 0; s < 4; ++s) {
    elements[s] = as_type<bfloat>(raw[s]);
  }
}

// Loads the lane's activations of a step: of two rows, 16 for each operation.
template <typename W, typename T>
METAL_FUNC void load_activations(
    thread T* elements, const device T* x, thread const uint* starts, uint k) {
  UNROLL for (int i = 0; i < 4 * W::VEC4S; ++i) {
    const int operation = i / 4;
    const int part = i / 2 % 2;
    const int row = i % 2;
    load_elements(
        elements + 16 * operation + 8 * part + 4 * row,
        x + vec4_offset<W>(part, operation),
        starts[row] + k);
  }
}

// Sums x over the step's k, for the four rows of x of the lane's results.
template <typename W, typename T>
METAL_FUNC float4 sums_of_results(thread const T* elements, int lane_index) {
  float2 sums = float2(0.0f);
  UNROLL for (int i = 0; i < 16 * W::VEC4S; ++i) {
    sums[i / 4 % 2] += float(elements[i]);
  }
  sums = float2(sum_over_pairs(sums.x), sum_over_pairs(sums.y));
  const float own = lane_of(lane_index).pair < 2 ? sums.x : sums.y;
  float4 result;
  UNROLL for (int s = 0; s < 4; ++s) {
    result[s] = from_row_of_result(own, s, lane_index);
  }
  return result;
}

// Computes the products of a step, which begin at -ZERO * sum(x) if codes exceed values by ZERO.
// Weights are decoded if DECODES, each before its operation, or are those of the block before.
template <bool DECODES, typename W, typename T>
METAL_FUNC void multiply_step(
    thread float* products,
    thread half* weights,
    thread const uint* words,
    thread const T* x_elements,
    float4 sums,
    float4 scale) {
  if (W::HAS_OFFSET) {
    UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
      products[i] = -float(W::ZERO) * sums[i % 4];
    }
  }
  UNROLL for (int operation = 0; operation < W::VEC4S; ++operation) {
    thread half* of_operation = weights + OPERATION_WEIGHTS * operation;
    if (DECODES) {
      tensor_weights<W>(of_operation, words, operation, scale);
    }
    if (W::HAS_OFFSET || operation > 0) {
      tensor_multiply<true>(products, of_operation, x_elements + 16 * operation);
    } else {
      tensor_multiply<false>(products, of_operation, x_elements);
    }
  }
}

// Adds the products of a step and a block of rows of x, scaled, to the totals of the block.
template <bool DECODES, typename W, typename T>
METAL_FUNC void accumulate_block(
    thread float* totals,
    thread half* weights,
    thread const uint* words,
    const device T* x,
    thread const uint* starts,
    uint k,
    GroupParams params,
    float weight_scale,
    int lane_index) {
  T x_elements[16 * W::VEC4S];
  load_activations<W>(x_elements, x, starts, k);
  float4 sums = float4(0.0f);
  if (needs_sums<W>()) {
    sums = sums_of_results<W>(x_elements, lane_index);
  }
  float products[TENSOR_RESULTS];
  multiply_step<DECODES, W>(products, weights, words, x_elements, sums, params.scale);
  UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
    const int f = i / 4;  // row of w
    const float scale =
        W::FRAGMENT >= HALF_WEIGHTS ? weight_scale : params.scale[f];
    totals[i] = fma(scale, products[i], totals[i]);
    totals[i] = W::BIASED ? fma(params.bias[f], sums[i % 4], totals[i]) : totals[i];
  }
}

// Main loop of one simdgroup: its steps of one split, for its blocks of rows of x.
template <int SIMDGROUPS_M, int BLOCKS, typename W, typename T, typename S, typename R>
METAL_FUNC void tensor_accumulate(
    thread float* totals,
    const device T* x,
    R row_map,
    WeightTile<S> tile,
    int first_row,
    Work work,
    Split split,
    Place place,
    int lane_index) {
  const Lane lane = lane_of(lane_index);
  uint starts[BLOCK_ROUNDS * BLOCKS];
  UNROLL for (int i = 0; i < BLOCK_ROUNDS * BLOCKS; ++i) {
    // Rows past the end read the last row; their results are never stored.
    const int row = min(first_row + lane.row + i * ROUND_ROWS * SIMDGROUPS_M, work.m - 1);
    starts[i] = input_row(row_map, row) * work.k + vec4_offset<W>(2 * lane.pair, 0);
  }
  UNROLL for (int i = 0; i < TENSOR_RESULTS * BLOCKS; ++i) {
    totals[i] = 0.0f;
  }
  // Uniform in a simdgroup: whether a second block has rows.
  const bool has_second = BLOCKS > 1 && first_row + TENSOR_ROWS * SIMDGROUPS_M < work.m;
  for (int k = first_step(split, place); k < split.k_stop; k = next_step<W::STEP>(k, place)) {
    uint words[words_of_step<W>()];
    load_words<W>(words, tile, k, lane_index);
    const GroupParams params = load_group_params<W>(tile, k);
    half weights[OPERATION_WEIGHTS * W::VEC4S];
    accumulate_block<true, W>(
        totals, weights, words, x, starts, k, params, tile.weight_scale, lane_index);
    if (has_second) {
      accumulate_block<false, W>(
          totals + TENSOR_RESULTS * (BLOCKS - 1),
          weights,
          words,
          x,
          starts + BLOCK_ROUNDS * (BLOCKS - 1),
          k,
          params,
          tile.weight_scale,
          lane_index);
    }
  }
}

// Writes the sums of one round of a block to the simdgroup's part of the scratch.
METAL_FUNC void
write_round(threadgroup float* scratch, thread const float* totals, int round, int lane_index) {
  const Lane lane = lane_of(lane_index);
  if (lane.pair / 2 == round) {
    UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
      scratch[(lane.pair % 2 * 4 + i % 4) * TILE_N + 8 * (i / 4) + lane.row] = totals[i];
    }
  }
}

// Adds the partial sums of the simdgroups along k in ascending order and stores the rows of a
// round that are inside the output.
template <int SIMDGROUPS_M, int SIMDGROUPS_K, typename O, typename E, typename R>
METAL_FUNC void store_round(
    O out,
    E epilogue,
    R row_map,
    const threadgroup float* scratch,
    Work work,
    Split split,
    int first_row,
    int simdgroup_index,
    int lane_index) {
  constexpr int ROWS = ROUND_ROWS * SIMDGROUPS_M;
  const int rows = min(ROWS, work.m - first_row);
  const int col = split.col + lane_index;
  const int stored = col < work.n ? rows : 0;
  for (int row = simdgroup_index; row < stored; row += SIMDGROUPS_M * SIMDGROUPS_K) {
    const threadgroup float* partial = scratch + row * TILE_N + lane_index;
    float total = partial[0];
    UNROLL for (int s = 1; s < SIMDGROUPS_K; ++s) {
      total += partial[s * ROWS * TILE_N];
    }
    const uint index = output_index(epilogue, output_row(row_map, first_row + row), col, work);
    total = apply_epilogue(total, epilogue, index, col);
    store(out, split.slot, rows_of_slot(row_map, work) * work.n, index, total);
  }
}

template <typename L, int BLOCKS, typename W, typename T, typename S, typename O, typename E>
METAL_FUNC void gemm_tensor(
    const device T* x,
    Weights<S> weights,
    Work work,
    device O* out,
    E epilogue,
    Simdgroup simdgroup) {
  const Place place = place_of_simdgroup<L::SIMDGROUPS_M, L::SIMDGROUPS_K, 1>(
      simdgroup.index, false, ROUND_ROWS);
  threadgroup float* own =
      simdgroup.scratch + (place.k_slice * L::TILE_M + place.row) * TILE_N;
  float totals[TENSOR_RESULTS * BLOCKS];

  Splits<L, 1, W::GROUP> splits = {work, simdgroup.threadgroup_index};
  while (splits.remain()) {
    const Split split = splits.next();
    const IdentityRows row_map = rows_of_product<L::BATCHED>(split, work);
    const WeightTile<S> tile =
        weight_tile<W>(weights, split.col, work, simdgroup.lane_index, split.product);
    const int row = split.row + place.row;
    // The condition is uniform in a simdgroup, as tensor operations require.
    if (row < work.m) {
      tensor_accumulate<L::SIMDGROUPS_M, BLOCKS, W>(
          totals, x, row_map, tile, row, work, split, place, simdgroup.lane_index);
    }
    // Totals are registers, so what indexes their blocks is a constant.
    UNROLL for (int block = 0; block < BLOCKS; ++block) {
      for (int round = 0; round < BLOCK_ROUNDS; ++round) {
        const int first_row = split.row + (BLOCK_ROUNDS * block + round) * L::TILE_M;
        if (first_row >= work.m) {
          break;
        }
        if (row < work.m) {
          write_round(own, totals + TENSOR_RESULTS * block, round, simdgroup.lane_index);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        store_round<L::SIMDGROUPS_M, L::SIMDGROUPS_K>(
            out,
            epilogue,
            row_map,
            simdgroup.scratch,
            work,
            split,
            first_row,
            simdgroup.index,
            simdgroup.lane_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
}
