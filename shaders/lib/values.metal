// Converts codes to the type in which they are multiplied. CUDA uses cuda/weights.cuh instead.

// Returns pair t of row fragment f as numbers of the codebook. Lane i has number i.
template <typename W>
METAL_FUNC float2 look_up(thread const uint* words, int f, int t) {
  const float own = as_type<float>(words[words_of_step<W>() - 1]);
  const ushort2 places = as_type<ushort2>(pair_at<W>(words, f, t, 0));
  return float2(simd_shuffle(own, places.x), simd_shuffle(own, places.y));
}

// Pairs of codes as values of type V. The halves are converted as one vector: if they are separated
// first, the compiler replaces each 32-bit logic operation by two of 16 bits.
template <typename V>
struct Pairs {
  template <typename W, bool HAS_OFFSET>
  static METAL_FUNC vec<V, 2> decode(thread const uint* words, int f, int t) {
    if (W::MODE == CODEBOOK) {
      return vec<V, 2>(look_up<W>(words, f, t));
    }
    const half2 halves = pair_as_halves<W>(words, f, t);
    if (W::MODE == FLOATING) {
      return vec<V, 2>(halves * half(W::FACTOR));
    }
    const vec<V, 2> values = vec<V, 2>(halves);
    return HAS_OFFSET ? values : values - V(W::ZERO);
  }
};

// Codes that are bfloats already.
template <>
struct Pairs<bfloat> {
  template <typename W, bool>
  static METAL_FUNC vec<bfloat, 2> decode(thread const uint* words, int f, int t) {
    return as_type<vec<bfloat, 2>>(pair_with_offset<W>(words, f, t));
  }
};

// Returns pair t of row fragment f, exactly: ZERO + code if HAS_OFFSET, otherwise the code, or the
// value of a small float.
template <typename W, typename V, bool HAS_OFFSET>
METAL_FUNC vec<V, 2> decode(thread const uint* words, int f, int t) {
  return Pairs<V>::template decode<W, HAS_OFFSET>(words, f, t);
}

// Returns whether a group's sum of activations is needed: for its bias, or for the codes' offset.
template <typename W>
METAL_FUNC constexpr bool needs_sums() {
  return W::FRAGMENT < HALF_WEIGHTS && (W::BIASED || W::HAS_OFFSET);
}

// Returns two E4M3 scales that are 16 bits apart.
METAL_FUNC half2 scales_of_small_floats(uint bits) {
  return small_floats(bits) * half(256.0f);
}
