// Epilogue: adds the simdgroups' partial tiles in threadgroup memory and stores the results.

// Columns of a scratch row: 32, plus four of padding against bank conflicts. The 32 lanes of a
// fragment (eight rows of w by four pairs of columns) then access 32 different banks.
constant constexpr int SCRATCH_ROW = TILE_N + 4;

// The epilogue that changes nothing.
struct Plain {};

// Adds a bias, applies an activation, multiplies and adds a residual, in this order. The
// operands of disabled parts are not read.
template <typename T, bool BIAS, int ACTIVATION, bool MULTIPLY, bool RESIDUAL, int PARTS>
struct Epilogue {
  const device T* bias;           // [n]
  const device T* multiplier;     // [m, n]
  const device T* residual;       // [m, n]
  const constant int32_t* parts;  // first columns of the PARTS results, and the end
};

constant constexpr int SILU = 1;
constant constexpr int GELU = 2;
constant constexpr int GELU_APPROX = 3;

// Abramowitz and Stegun 7.1.26: the error is below 1.5e-7.
METAL_FUNC float error_function(float x) {
  const float t = 1.0f / (1.0f + 0.3275911f * abs(x));
  const float series =
      t * (0.254829592f +
           t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return copysign(1.0f - series * exp(-x * x), x);
}

template <int ACTIVATION>
METAL_FUNC float activate(float x) {
  if (ACTIVATION == SILU) {
    return x / (1.0f + exp(-x));
  }
  if (ACTIVATION == GELU) {
    return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
  }
  if (ACTIVATION == GELU_APPROX) {
    // The tanh approximation, with one exponential whose overflow does not produce NaN.
    const float slope = 1.59576912f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-slope));
  }
  return x;
}

METAL_FUNC float apply_epilogue(float value, Plain, uint, uint) {
  return value;
}

template <typename T, bool BIAS, int ACTIVATION, bool MULTIPLY, bool RESIDUAL, int PARTS>
METAL_FUNC float apply_epilogue(
    float value,
    Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS> epilogue,
    uint index,
    uint col) {
  value = activate<ACTIVATION>(BIAS ? value + float(epilogue.bias[col]) : value);
  value = MULTIPLY ? value * float(epilogue.multiplier[index]) : value;
  return RESIDUAL ? value + float(epilogue.residual[index]) : value;
}

METAL_FUNC uint output_index(Plain, uint row, uint col, Work work) {
  return row * work.n + col;
}

// The columns of a product may belong to PARTS results. Their arrays [m, columns] are
// contiguous in the output, one after the other.
template <typename T, bool BIAS, int ACTIVATION, bool MULTIPLY, bool RESIDUAL, int PARTS>
METAL_FUNC uint output_index(
    Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS> epilogue,
    uint row,
    uint col,
    Work work) {
  if (PARTS == 1) {
    return row * work.n + col;
  }
  uint first = 0;
  uint end = epilogue.parts[1];
  UNROLL for (int i = 1; i < PARTS; ++i) {
    if (col >= uint(epilogue.parts[i])) {
      first = epilogue.parts[i];
      end = epilogue.parts[i + 1];
    }
  }
  return work.m * first + row * (end - first) + (col - first);
}

// Stores to the split's slot of the workspace, `size` elements. `lib/atomic` adds instead.
template <typename O>
METAL_FUNC void store(device O* out, uint slot, uint size, uint index, float value) {
  out[slot * size + index] = O(value);
}

// Maps a row of the product to its rows of x and of the output: the same row, after the rows of
// the preceding products of a batch.
struct IdentityRows {
  uint first;
  uint others;  // rows of all other products
};

template <bool BATCHED>
METAL_FUNC IdentityRows rows_of_product(Split split, Work work) {
  IdentityRows row_map = {0, 0};
  if (BATCHED) {
    row_map.first = split.product * work.m;
    row_map.others = (work.batch - 1) * work.m;
  }
  return row_map;
}

METAL_FUNC uint input_row(IdentityRows row_map, uint row) {
  return row_map.first + row;
}

METAL_FUNC uint output_row(IdentityRows row_map, uint row) {
  return row_map.first + row;
}

// Returns the number of rows of a slot of the workspace.
METAL_FUNC uint rows_of_slot(IdentityRows row_map, Work work) {
  return work.m + row_map.others;
}

// The rows of w that an epilogue needs. TILES_N: those of leading tiles, in units of TILE_N.
template <typename E, int TILES_N>
struct WeightRows {
  STATIC int WIDTH = TILES_N;  // columns of these tiles in the output

  static METAL_FUNC Work sizes(Work work) {
    return work;
  }

  // Returns the first row of a simdgroup.
  static METAL_FUNC int first(Split split, Place place, Work) {
    return split.col + TILE_N * place.column;
  }
};

// Adds an element's partial sums by the simdgroups along k, in ascending order.
// partial: that of the first simdgroup, in the given column of a row of scratch.
template <int TILE_M, int SIMDGROUPS_K, int TILES_N, typename E>
METAL_FUNC float tile_value(E, const threadgroup float* partial, int, int k_slices) {
  float total = partial[0];
  UNROLL for (int s = 1; s < SIMDGROUPS_K; ++s) {
    if (TILES_N == 1 || s < k_slices) {
      total += partial[s * TILE_M * SCRATCH_ROW];
    }
  }
  return total;
}

// Adds the partial tiles of the simdgroups along k in ascending order and stores the elements
// inside the output: results, or partial sums in the split's slot of the workspace.
template <
    int TILE_M,
    int SIMDGROUPS_K,
    int TILES_N,
    int SIMDGROUPS,
    typename O,
    typename E,
    typename R>
METAL_FUNC void store_tile(
    O out,
    E epilogue,
    R row_map,
    const threadgroup float* scratch,
    Work work,
    Split split,
    int k_slices,
    int simdgroup_index,
    int lane_index) {
  const int rows = min(TILE_M, work.m - split.row);
  const int cols = work.n - split.col;
  const int columns = TILES_N > 1 ? SIMDGROUPS_K / k_slices : 1;
  // A simdgroup stores one row at a time; a lane always stores the same column.
  const int lines = TILES_N > 1 ? columns * TILE_M : lane_index < cols ? rows : 0;
  for (int line = simdgroup_index; line < lines; line += SIMDGROUPS) {
    const int column = TILES_N > 1 ? line / TILE_M : 0;
    const int row = TILES_N > 1 ? line % TILE_M : line;
    const int col = column * TILE_N + lane_index;
    if (TILES_N > 1 && (row >= rows || col >= cols)) {
      continue;
    }
    const threadgroup float* partial =
        scratch + (column * k_slices * TILE_M + row) * SCRATCH_ROW + lane_index;
    float total =
        tile_value<TILE_M, SIMDGROUPS_K, TILES_N>(epilogue, partial, lane_index, k_slices);
    const uint index =
        output_index(epilogue, output_row(row_map, split.row + row), split.col + col, work);
    total = apply_epilogue(total, epilogue, index, split.col + col);
    store(out, split.slot, rows_of_slot(row_map, work) * work.n, index, total);
  }
}
