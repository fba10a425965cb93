// Epilogue of a gated network whose layers gate and up are one weight [2 * n, k]: stores the
// activation of the product with the first n rows times the product with the last n rows. Half of
// the simdgroups compute a tile of gate, the others the same columns of up, as if both were one
// tile of twice the width. So the main loop is that of any other product.

template <int ACTIVATION>
struct Gated {};

template <int ACTIVATION, int TILES_N>
struct WeightRows<Gated<ACTIVATION>, TILES_N> {
  STATIC int WIDTH = TILES_N / 2;

  static METAL_FUNC Work sizes(Work work) {
    work.n *= 2;
    return work;
  }

  static METAL_FUNC int first(Split split, Place place, Work work) {
    return split.col + work.n * place.column;
  }
};

// Returns an element of gate and the same one of up. factor: that of their row.
template <int TILE_M, int SIMDGROUPS_K, int TILES_N>
METAL_FUNC float2 gate_and_up(const threadgroup float* partial, float factor) {
  constexpr int K_SLICES = SIMDGROUPS_K / 2;
  const threadgroup float* other = partial + K_SLICES * TILE_M * SCRATCH_ROW;
  const float gate = tile_value<TILE_M, K_SLICES, TILES_N>(Plain{}, partial, 0, K_SLICES);
  const float up = tile_value<TILE_M, K_SLICES, TILES_N>(Plain{}, other, 0, K_SLICES);
  return factor * float2(gate, up);
}

template <int TILE_M, int SIMDGROUPS_K, int TILES_N, int ACTIVATION>
METAL_FUNC float tile_value(Gated<ACTIVATION>, const threadgroup float* partial, int, int) {
  const float2 both = gate_and_up<TILE_M, SIMDGROUPS_K, TILES_N>(partial, 1.0f);
  return gated<ACTIVATION>(both.x, both.y);
}

template <int ACTIVATION>
METAL_FUNC float apply_epilogue(float value, Gated<ACTIVATION>, uint, uint) {
  return value;
}

template <int ACTIVATION>
METAL_FUNC uint output_index(Gated<ACTIVATION>, uint row, uint col, Work work) {
  return row * work.n + col;
}
