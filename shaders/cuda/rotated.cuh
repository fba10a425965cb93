// Epilogue that applies RoPE to heads, as MLX's rope does: features i and i + FEATURES / 2 of a
// head are a point, which is rotated by the angle position / freqs[i].

// Rotates a point. Full turns are subtracted first, with 2 pi as a sum of two floats, because one
// float is not precise enough. The sine and cosine instructions then have an error of 1e-6, even
// for angles of a million. CUDA's own function uses a stack for large angles.
METAL_FUNC Point turned(Point point, float angle) {
  const float turns = rintf(angle * 0.15915494f);
  angle = fmaf(turns, -6.2831855f, angle);
  angle = fmaf(turns, 1.7484556e-7f, angle);
  float sine;
  float cosine;
  __sincosf(angle, &sine, &cosine);
  return {point.x * cosine - point.y * sine, point.x * sine + point.y * cosine};
}

// Heads without normalization.
struct PlainHeads {
  static constexpr int TOGETHER = 1;

  METAL_FUNC void normalize(Point*, int, int) const {
  }
};

// RMSNorm of each head. EPSILON has the bits of the float epsilon. The heads in the first QUERIES
// columns have the weight q, the others k.
template <typename T, int EPSILON, int QUERIES, int FEATURES>
struct Normalized {
  static constexpr int HALF = FEATURES / 2;
  static constexpr int TOGETHER = HALF / TILE_N;
  const T* q;  // [FEATURES]
  const T* k;

  // A lane has the points i, i + TILE_N and so on of a head that begins at col - i.
  METAL_FUNC void normalize(Point* points, int i, int col) const {
    float squares = 0.0f;
    UNROLL for (int j = 0; j < TOGETHER; ++j) {
      squares = fmaf(points[j].x, points[j].x, squares);
      squares = fmaf(points[j].y, points[j].y, squares);
    }
    const float factor = rsqrtf(sum_of_warp(squares) / FEATURES + as_type<float>(EPSILON));
    const T* weight = (col < QUERIES ? q : k) + i;
    UNROLL for (int j = 0; j < TOGETHER; ++j) {
      points[j].x *= factor * float(weight[j * TILE_N]);
      points[j].y *= factor * float(weight[j * TILE_N + HALF]);
    }
  }
};

// Rotates the first ROTATED columns and multiplies them by the float that has the bits of FACTOR.
// EACH: every row has its own position; otherwise all rows have the first one.
template <
    typename T,
    bool BIAS,
    int PARTS,
    int FEATURES,
    int ROTATED,
    bool EACH,
    int FACTOR,
    typename N = PlainHeads>
struct Rotated {
  static constexpr int HALF = FEATURES / 2;
  static constexpr int TOGETHER = N::TOGETHER;
  static_assert(HALF % TILE_N == 0, "the first columns of a tile's pairs lie side by side");
  Epilogue<T, BIAS, 0, false, false, PARTS> before;
  const int* positions;     // [m], or one for all rows
  const float* freqs;  // [HALF]
  N norms;

  static METAL_FUNC int first_of_pair(int pair, int) {
    return pair / HALF * FEATURES + pair % HALF;
  }

  static METAL_FUNC int distance_of_pair(int) {
    return HALF;
  }

  template <typename O>
  METAL_FUNC void store_pairs(O out, uint row, int pair, const Point* sums, Work work) const {
    const int col = first_of_pair(pair, work.n);
    const uint index = output_index(before, row, col, work);
    Point points[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; ++i) {
      points[i] = with_bias(sums[i], index + i * TILE_N, col + i * TILE_N);
    }
    if (col < ROTATED) {
      norms.normalize(points, pair % HALF, col);
      const int at = positions[EACH ? row : 0];
      UNROLL for (int i = 0; i < TOGETHER; ++i) {
        const float frequency = 1.0f / freqs[pair % HALF + i * TILE_N];
        points[i] = turned(points[i], at * frequency);
        points[i].x *= as_type<float>(FACTOR);
        points[i].y *= as_type<float>(FACTOR);
      }
    }
    UNROLL for (int i = 0; i < TOGETHER; ++i) {
      store(out, 0, 0, index + i * TILE_N, points[i].x);
      store(out, 0, 0, index + i * TILE_N + HALF, points[i].y);
    }
  }

  METAL_FUNC Point with_bias(Point sums, uint index, int col) const {
    return {
        apply_epilogue(sums.x, before, index, col),
        apply_epilogue(sums.y, before, index + HALF, col + HALF)};
  }
};
