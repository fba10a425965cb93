// Values in the type in which they are multiplied. CUDA has functions of its own for this.

// The pair of step t, exactly: ZERO + code, or code where SUBTRACT; of a small float its value.
// The halves are converted as one vector: taken apart before, the logic operations that made
// them become two of 16 bits each.
template <typename W, typename V, bool SUBTRACT>
METAL_FUNC vec<V, 2> decode(thread const uint* words, int f, int t) {
  const half2 halves = pair_as_halves<W>(words, f, t);
  if (W::MODE == FLOATING) {
    return vec<V, 2>(halves * half(W::FACTOR));  // mutant: factor
  }
  const vec<V, 2> values = vec<V, 2>(halves);
  return SUBTRACT ? values - V(W::ZERO) : values;
}

// Two E4M3, 16 bits apart.
METAL_FUNC half2 scales_of_small_floats(uint bits) {
  return small_floats(bits) * half(256.0f);  // mutant: small_scale
}
