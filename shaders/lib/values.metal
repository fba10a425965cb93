// Converts codes to the type in which they are multiplied. CUDA uses cuda/weights.cuh instead.

// Returns pair t of row fragment f, exactly: ZERO + code, or the code if SUBTRACT, or the value
// of a small float. The halves are converted as one vector: if they are separated first, the
// compiler replaces each 32-bit logic operation by two of 16 bits.
template <typename W, typename V, bool SUBTRACT>
METAL_FUNC vec<V, 2> decode(thread const uint* words, int f, int t) {
  const half2 halves = pair_as_halves<W>(words, f, t);
  if (W::MODE == FLOATING) {
    return vec<V, 2>(halves * half(W::FACTOR));  // mutant: factor
  }
  const vec<V, 2> values = vec<V, 2>(halves);
  return SUBTRACT ? values - V(W::ZERO) : values;
}

// Returns two E4M3 scales that are 16 bits apart.
METAL_FUNC half2 scales_of_small_floats(uint bits) {
  return small_floats(bits) * half(256.0f);  // mutant: small_scale
}
