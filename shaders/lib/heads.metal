// Heads of q and k: RMSNorm, and RoPE as MLX's up to the rounding of the angle: features i and
// i + FEATURES / 2 of a head are a point, which is rotated by position / freqs[i].

// A head before and after its rotation. In Metal 4.1 `this` is generic in members without `thread`.
template <int FEATURES>
struct Head {
  static constant constexpr int HALF = FEATURES / 2;
  static constant constexpr int POINTS = (HALF + 31) / 32;  // of a lane: lane, lane + 32 and so on
  float x[POINTS];
  float y[POINTS];

  template <typename T>
  METAL_FUNC void load(const device T* head, uint lane) thread {
    UNROLL for (int i = 0; i < POINTS; ++i) {
      const uint point = lane + 32 * i;
      x[i] = point < HALF ? float(head[point]) : 0.0f;
      y[i] = point < HALF ? float(head[point + HALF]) : 0.0f;
    }
  }

  template <typename T>
  METAL_FUNC void apply_norm(const device T* weight, float epsilon, uint lane) thread {
    float squares = 0;
    UNROLL for (int i = 0; i < POINTS; ++i) {
      squares += x[i] * x[i] + y[i] * y[i];
    }
    const float factor = rsqrt(simd_sum(squares) / FEATURES + epsilon);
    UNROLL for (int i = 0; i < POINTS; ++i) {
      const uint point = lane + 32 * i;
      x[i] *= factor * (point < HALF ? float(weight[point]) : 0.0f);
      y[i] *= factor * (point < HALF ? float(weight[point + HALF]) : 0.0f);
    }
  }

  template <typename T>
  METAL_FUNC void store_rotated(
      device T* out, const device float* freqs, int position, float factor, uint lane) const
      thread {
    UNROLL for (int i = 0; i < POINTS; ++i) {
      const uint point = lane + 32 * i;
      if (point < HALF) {
        const float angle = float(position) / freqs[point];
        // Not the fast ones, whose error grows with the angle: a position may be 10^6.
        const float sine = metal::precise::sin(angle) * factor;
        const float cosine = metal::precise::cos(angle) * factor;
        out[point] = T(x[i] * cosine - y[i] * sine);
        out[point + HALF] = T(x[i] * sine + y[i] * cosine);
      }
    }
  }
};

// Writes q[streams, HEADS, TOKENS, FEATURES] and k[streams, KV_HEADS, TOKENS, FEATURES] of
// qkv[streams, TOKENS, COLUMNS]. positions: of the first token of each stream if PER_STREAM, else
// of all. P: a pointer to integers; Metal passes few positions in `constant`. A simdgroup
// computes one head of one token.
template <
    int HEADS,
    int KV_HEADS,
    int FEATURES,
    int COLUMNS,
    int TOKENS,
    bool PER_STREAM,
    bool NORM,
    typename T,
    typename P>
METAL_FUNC void rotate_heads(
    const device T* qkv,
    P positions,
    const device float* freqs,
    const device T* q_norm,
    const device T* k_norm,
    device T* q,
    device T* k,
    float epsilon,
    float factor,
    uint index,
    uint lane) {
  const uint row = index / (HEADS + KV_HEADS);
  const uint head = index % (HEADS + KV_HEADS);
  const uint stream = row / TOKENS;
  const uint token = row % TOKENS;
  const bool is_query = head < HEADS;
  Head<FEATURES> own;
  own.load(qkv + row * COLUMNS + head * FEATURES, lane);
  if (NORM) {
    own.apply_norm(is_query ? q_norm : k_norm, epsilon, lane);
  }
  const int position = positions[PER_STREAM ? stream : 0] + int(token);
  const uint of_q = (stream * HEADS + head) * TOKENS + token;
  const uint of_k = (stream * KV_HEADS + head - HEADS) * TOKENS + token;
  device T* out = is_query ? q + of_q * FEATURES : k + of_k * FEATURES;
  own.store_rotated(out, freqs, position, factor, lane);
}
