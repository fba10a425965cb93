// RMSNorm of the rows of x, deferred: a row's product with w is that of x * weight, times the
// row's factor rsqrt(mean(x * x) + epsilon). The main loop of gemv multiplies x by the weight and
// adds up the squares of x; the sums are multiplied by the factor before anything else. Nothing is
// rounded between norm and product, where MLX rounds to T.

template <typename E, typename T>
struct Normed {
  E epilogue;              // what follows the product
  const device T* weight;  // [k]
  float epsilon;
  float k;
};

// epsilon_bits: the bits of a float, because template arguments cannot be floats.
template <typename E, typename T>
METAL_FUNC Normed<E, T> normed(
    E epilogue, const device T* weight, int epsilon_bits, const constant int32_t* shape) {
  Normed<E, T> result = {epilogue, weight, as_type<float>(epsilon_bits), float(shape[2])};
  return result;
}

// Rows of x that are normalized, and what the lane knows of their norm.
template <int ROWS, typename T>
struct NormedRows {
  STATIC int OPERAND = FLOAT_WEIGHTS;  // x times weight exceeds a half
  RowStride rows;
  const device T* weight;
  float4 squares[ROWS];  // sums over the k that the lane has loaded
};

template <int ROWS, typename E, typename T>
METAL_FUNC NormedRows<ROWS, T> rows_for(Normed<E, T> epilogue, RowStride rows) {
  NormedRows<ROWS, T> result;
  result.rows = rows;
  result.weight = epilogue.weight;
  UNROLL for (int row = 0; row < ROWS; ++row) {
    result.squares[row] = float4(0.0f);
  }
  return result;
}

template <int ROWS, typename T>
METAL_FUNC uint start_of(NormedRows<ROWS, T> normed, int row) {
  return start_of(normed.rows, row);
}

// Multiplies the activations of a step by the weight, and adds up their squares. start: the first
// k of the lane.
template <typename W, int ROWS, typename T>
METAL_FUNC void scale_rows(W, thread NormedRows<ROWS, T>& normed, thread float4* x_vec4, uint start) {
  constexpr int VEC4S = W::VEC4S;
  UNROLL for (int i = 0; i < 2 * VEC4S; ++i) {
    const device T* first = normed.weight + vec4_offset<W>(i / VEC4S, i % VEC4S);
    const float4 weight = float4(load_vec4(first, start));
    UNROLL for (int row = 0; row < ROWS; ++row) {
      thread float4& values = x_vec4[2 * VEC4S * row + i];
      normed.squares[row] = fma(values, values, normed.squares[row]);
      values *= weight;
    }
  }
}

// Writes each row's sum of squares behind the columns of its row of scratch.
template <int ROWS, typename T>
METAL_FUNC void write_rows(
    threadgroup float* scratch,
    thread const float4* totals,
    int corner,
    Lane lane,
    NormedRows<ROWS, T> normed) {
  write_rows<ROWS>(scratch, totals, corner, lane, normed.rows);
  UNROLL for (int row = 0; row < ROWS; ++row) {
    const float total = sum_over_pairs(sum_of_x<1>(normed.squares + row));
    if (lane.row == 0 && lane.pair == 0) {
      scratch[corner + row * SCRATCH_ROW + TILE_N] = total;
    }
  }
}

// Returns the factor of a row. K_SLICES: simdgroups that have its squares.
template <int TILE_M, int K_SLICES, typename E, typename T>
METAL_FUNC float
factor_of_row(Normed<E, T> epilogue, const threadgroup float* partial, int column) {
  const threadgroup float* squares = partial + TILE_N - column;
  const float sum = tile_value<TILE_M, K_SLICES, 1>(Plain{}, squares, 0, K_SLICES);
  return rsqrt(sum / epilogue.k + epilogue.epsilon);
}

template <int TILE_M, int SIMDGROUPS_K, int TILES_N, typename E, typename T>
METAL_FUNC float
tile_value(Normed<E, T> epilogue, const threadgroup float* partial, int column, int k_slices) {
  const float factor = factor_of_row<TILE_M, SIMDGROUPS_K>(epilogue, partial, column);
  return factor * tile_value<TILE_M, SIMDGROUPS_K, TILES_N>(Plain{}, partial, column, k_slices);
}

template <int TILE_M, int SIMDGROUPS_K, int TILES_N, int ACTIVATION, typename T>
METAL_FUNC float tile_value(
    Normed<Gated<ACTIVATION>, T> epilogue, const threadgroup float* partial, int column, int) {
  const float factor = factor_of_row<TILE_M, SIMDGROUPS_K / 2>(epilogue, partial, column);
  const float2 both = gate_and_up<TILE_M, SIMDGROUPS_K, TILES_N>(partial, factor);
  return activate<ACTIVATION>(both.x) * both.y;
}

template <typename E, typename T, int TILES_N>
struct WeightRows<Normed<E, T>, TILES_N> : WeightRows<E, TILES_N> {};

template <typename E, typename T>
METAL_FUNC float apply_epilogue(float value, Normed<E, T> epilogue, uint index, uint col) {
  return apply_epilogue(value, epilogue.epilogue, index, col);
}

template <typename E, typename T>
METAL_FUNC uint output_index(Normed<E, T> epilogue, uint row, uint col, Work work) {
  return output_index(epilogue.epilogue, row, col, work);
}
