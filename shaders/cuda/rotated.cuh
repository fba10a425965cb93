// Heads that are rotated by their rows' places as they are stored, as MLX's rope does it: features
// i and i + FEATURES / 2 of a head are a point, turned by place / periods[i].

struct Point {
  float x;
  float y;
};

// Whole turns are taken away first, in two parts, because a float alone holds a turn badly: then
// the two instructions for sine and cosine err by 1e-6, also of angles of a million. CUDA's own
// function has a stack for larger ones.
METAL_FUNC Point turned(Point point, float angle) {
  const float turns = rintf(angle * 0.15915494f);
  angle = fmaf(turns, -6.2831855f, angle);
  angle = fmaf(turns, 1.7484556e-7f, angle);
  float sine;
  float cosine;
  __sincosf(angle, &sine, &cosine);
  return {point.x * cosine - point.y * sine, point.x * sine + point.y * cosine};
}

// The first ROTATED columns are rotated; EACH row has a place of its own, or all have one.
template <typename T, bool BIAS, int PARTS, int FEATURES, int ROTATED, bool EACH>
struct Rotated {
  static constexpr int HALF = FEATURES / 2;
  static_assert(HALF % TILE_N == 0, "the first columns of a tile's pairs lie side by side");
  Epilogue<T, BIAS, 0, false, false, PARTS> before;
  const int* places;     // [m], or the first is that of all
  const float* periods;  // [HALF]

  static METAL_FUNC int first_of_pair(int pair, int) {
    return pair / HALF * FEATURES + pair % HALF;
  }

  static METAL_FUNC int distance_of_pair(int) {
    return HALF;
  }

  template <typename O>
  METAL_FUNC void store_pair(O out, uint row, int pair, float x, float y, Work work) const {
    const int col = first_of_pair(pair, work.n);
    const uint place = output_place(before, row, col, work);
    Point point = {finished(x, before, place, col), finished(y, before, place + HALF, col + HALF)};
    if (col < ROTATED) {
      const float frequency = 1.0f / periods[pair % HALF];
      point = turned(point, places[EACH ? row : 0] * frequency);
    }
    store(out, 0, 0, place, point.x);
    store(out, 0, 0, place + HALF, point.y);
  }
};
