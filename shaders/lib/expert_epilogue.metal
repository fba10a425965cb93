// Epilogue of products of experts: adds the biases of an expert, and gates the product with its
// first weight by that with its second one. For a gate, half of the simdgroups along k compute the
// first product and the others the second one. So the main loop is that of any other product.

constant constexpr int NO_GATE = 0;

// The operands of disabled parts are not read.
template <int GATE, bool BIAS, typename T, typename S>
struct ExpertEpilogue {
  Weights<S> second;     // weights of up; those of gate are the kernel's own
  const device T* bias;  // [experts, n]
  const device T* second_bias;
};

template <int GATE, bool BIAS, typename T, typename S>
struct WeightsOf<ExpertEpilogue<GATE, BIAS, T, S>> {
  STATIC int COUNT = GATE == NO_GATE ? 1 : 2;
};

// Returns the epilogue of a kernel with these arrays.
template <int GATE, bool BIAS, typename T, typename S>
METAL_FUNC ExpertEpilogue<GATE, BIAS, T, S> expert_epilogue(
    Weights<S> second, const device T* bias, const device T* second_bias) {
  return {second, bias, second_bias};
}

template <int GATE, bool BIAS, typename T, typename S>
METAL_FUNC Weights<S> weights_of(
    ExpertEpilogue<GATE, BIAS, T, S> epilogue, Weights<S> first, int column) {
  return GATE != NO_GATE && column == 1 ? epilogue.second : first;
}

template <int GATE, bool BIAS, typename T, typename S>
METAL_FUNC ExpertEpilogue<GATE, BIAS, T, S> at_column(
    ExpertEpilogue<GATE, BIAS, T, S> epilogue, ulong first) {
  epilogue.bias += first;
  epilogue.second_bias += first;
  return epilogue;
}

template <int TILE_M, int SIMDGROUPS_K, int TILES_N, int GATE, bool BIAS, typename T, typename S>
METAL_FUNC float tile_value(
    ExpertEpilogue<GATE, BIAS, T, S> epilogue,
    const threadgroup float* partial,
    int col,
    int k_slices) {
  if (GATE == NO_GATE) {
    const float total = tile_value<TILE_M, SIMDGROUPS_K, TILES_N>(Plain{}, partial, col, k_slices);
    return BIAS ? total + float(epilogue.bias[col]) : total;
  }
  float2 both = gate_and_up<TILE_M, SIMDGROUPS_K, TILES_N>(partial, 1.0f);
  if (BIAS) {
    both += float2(float(epilogue.bias[col]), float(epilogue.second_bias[col]));
  }
  return gated<GATE>(both.x, both.y);
}

template <int GATE, bool BIAS, typename T, typename S>
METAL_FUNC float apply_epilogue(float value, ExpertEpilogue<GATE, BIAS, T, S>, uint, uint) {
  return value;
}

template <int GATE, bool BIAS, typename T, typename S>
METAL_FUNC uint output_index(ExpertEpilogue<GATE, BIAS, T, S>, uint row, uint col, Work work) {
  return row * work.n + col;
}
