// Dot products for one to five rows of x. Each lane adds its own k values of four rows of w in
// float32; lanes are combined only at the end of a split. The words, their order and the loads
// are those of gemm_register. Activations are widened where they are multiplied, because they
// take fewer registers as they are.
//
// L  Tiling; ROWS is the number of rows of x
// W  WeightFormat

// Offsets of consecutive rows of x.
struct RowStride {
  STATIC int OPERAND = BFLOAT_CODES;  // activations are kept as its operands
  uint first;
  uint k;
};

METAL_FUNC uint start_of(RowStride starts, int row) {
  return starts.first + row * starts.k;
}

// Rows as they are; those of an RMSNorm are scaled here (`NormedRows`).
template <typename W, typename Vec4>
METAL_FUNC void scale_rows(W, RowStride, thread Vec4*, uint) {
}

// The rows that an epilogue asks for.
template <int ROWS, typename E>
METAL_FUNC RowStride rows_for(E, RowStride rows) {
  return rows;
}

// Loads the operands of one step. x_vec4[(row * 2 + b) * VEC4S + h] has activations of fragment
// column 2 * pair + b.
template <int ROWS, typename W, typename F, typename T, typename S, typename Rows>
METAL_FUNC GroupParams load_vectors(
    thread uint* words,
    thread vec<F, 4>* x_vec4,
    WeightTile<S> tile,
    const device T* x,
    thread Rows& starts,
    int lane_index,
    int k) {
  constexpr int VEC4S = W::VEC4S;
  load_words<W>(words, tile, k, lane_index);
  const uint start = k + vec4_offset<W>(2 * lane_of(lane_index).pair, 0);
  UNROLL for (int i = 0; i < 2 * ROWS * VEC4S; ++i) {
    const device T* first = x + vec4_offset<W>(i / VEC4S % 2, i % VEC4S);
    x_vec4[i] = load_operand(F(), first, start_of(starts, i / VEC4S / 2) + start);
  }
  scale_rows(W(), starts, x_vec4, start);
  return load_group_params<W>(tile, k);
}

// Computes products[row][f], the lane's codes of row fragment f times its activations, and the
// sums of the activations.
template <int ROWS, typename W, typename Vec4>
METAL_FUNC void multiply_rows(
    thread float4* products,
    thread float* sums,
    thread const uint* words,
    thread const Vec4* x_vec4) {
  constexpr int VEC4S = W::VEC4S;
  UNROLL for (int row = 0; row < ROWS; ++row) {
    products[row] = float4(0.0f);
    sums[row] = 0.0f;
  }
  UNROLL for (int i = 0; i < 4 * W::PAIRS; ++i) {
    const int step = i / 4;
    const int f = i % 4;
    const float2 values = decode<W, float, W::OPERAND == OFFSET_CODES>(words, f, step);
    UNROLL for (int row = 0; row < ROWS; ++row) {
      thread const Vec4* columns = x_vec4 + 2 * row * VEC4S + step / 4;
      const float first = as_floats(columns[0])[step % 4];
      const float second = as_floats(columns[VEC4S])[step % 4];
      products[row][f] = fma(values.x, first, products[row][f]);
      products[row][f] = fma(values.y, second, products[row][f]);
      sums[row] += f == 0 ? first + second : 0.0f;
    }
  }
}

// Main loop of one simdgroup: its steps of one split, for ROWS rows of x.
template <int ROWS, typename W, typename T, typename S, typename Rows>
METAL_FUNC void accumulate_rows(
    thread float4* totals,
    const device T* x,
    thread Rows& starts,
    WeightTile<S> tile,
    Split split,
    Place place,
    int lane_index) {
  typedef typename Operands<T, Rows::OPERAND>::Activation F;
  constexpr bool HAS_OFFSET = W::OPERAND == OFFSET_CODES && W::ZERO != 0;
  constexpr int VEC4S = W::VEC4S;
  UNROLL for (int row = 0; row < ROWS; ++row) {
    totals[row] = float4(0.0f);
  }
  for (int k = first_step(split, place); k < split.k_stop; k = next_step<W::STEP>(k, place)) {
    uint words[words_of_step<W>()];
    vec<F, 4> x_vec4[2 * ROWS * VEC4S];
    const GroupParams params =
        load_vectors<ROWS, W, F>(words, x_vec4, tile, x, starts, lane_index, k);
    float4 products[ROWS];
    float sums[ROWS];
    multiply_rows<ROWS, W>(products, sums, words, x_vec4);
    const float4 scale = params.scale * tile.weight_scale;
    // Each code exceeds its value by ZERO, which is taken off with the bias. Scale and bias of a
    // super-block have too many bits for that: their sum would be rounded.
    constexpr bool IN_BIAS = HAS_OFFSET && !W::SUPER;
    const float4 bias = (W::BIASED ? params.bias : float4(0.0f)) -
        (IN_BIAS ? float(W::ZERO) * scale : float4(0.0f));
    UNROLL for (int row = 0; row < ROWS; ++row) {
      if (W::BIASED || IN_BIAS) {
        totals[row] = fma(bias, float4(sums[row]), totals[row]);
      }
      if (HAS_OFFSET && W::SUPER) {
        products[row] = fma(float4(-float(W::ZERO)), float4(sums[row]), products[row]);
      }
      totals[row] = fma(scale, products[row], totals[row]);
    }
  }
}

// Adds the lanes' totals of ROWS rows. corner: index in scratch of the simdgroup's tile.
template <int ROWS, typename R>
METAL_FUNC void write_rows(
    threadgroup float* scratch, thread const float4* totals, int corner, Lane lane, R) {
  UNROLL for (int i = 0; i < 4 * ROWS; ++i) {
    const float total = sum_over_pairs(totals[i / 4][i % 4]);
    if (lane.pair == 0) {
      scratch[corner + i / 4 * SCRATCH_ROW + lane.row + 8 * (i % 4)] = total;
    }
  }
}

template <typename L, typename W, typename T, typename S, typename O, typename E>
METAL_FUNC void gemv(
    const device T* x,
    Weights<S> weights,
    Work work,
    device O* out,
    E epilogue,
    Simdgroup simdgroup) {
  constexpr int ROWS = L::ROWS;
  typedef WeightRows<E, L::TILES_N> R;
  work.m_tiles = 1;  // a tile has all rows; the constant saves a division and registers
  Splits<L, R::WIDTH, W::GROUP> splits = {work, simdgroup.threadgroup_index};
  const Place place = place_of_simdgroup<1, L::SIMDGROUPS_K, L::TILES_N>(
      simdgroup.index, simdgroup.threadgroup_index < work.whole, 0);
  const int corner = simdgroup.index * ROWS * SCRATCH_ROW;
  while (splits.remain()) {
    const Split split = splits.next();
    const IdentityRows row_map = rows_of_product<L::BATCHED>(split, work);
    const WeightTile<S> tile = weight_tile<W>(
        weights,
        R::first(split, place, work),
        R::sizes(work),
        simdgroup.lane_index,
        split.product);
    auto starts = rows_for<ROWS>(epilogue, RowStride{input_row(row_map, 0) * work.k, uint(work.k)});
    float4 totals[ROWS];
    accumulate_rows<ROWS, W>(totals, x, starts, tile, split, place, simdgroup.lane_index);
    write_rows<ROWS>(simdgroup.scratch, totals, corner, lane_of(simdgroup.lane_index), starts);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_tile<ROWS, L::SIMDGROUPS_K, R::WIDTH, L::SIMDGROUPS_K>(
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
