// The functions by which one value gates another.

// The gate of gpt-oss, in addition to the activations of epilogue.metal: it clips both values and
// adds 1 to `up`.
constant constexpr int CLIPPED_SWIGLU = 4;

// Returns the activation of gate times up.
template <int ACTIVATION>
METAL_FUNC float gated(float gate, float up) {
  if (ACTIVATION == CLIPPED_SWIGLU) {
    gate = gate > 7.0f ? 7.0f : gate;  // NaN stays NaN
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return gate / (1.0f + exp(-1.702f * gate)) * (up + 1.0f);
  }
  return activate<ACTIVATION>(gate) * up;
}
