// Heads of a product that are rotated by their rows' places as they are stored, as MLX's rope does
// it: features i and i + FEATURES / 2 of a head are a point, turned by place / periods[i]. A tile
// has as many columns of the first halves of heads as of the second ones, so that both lie in the
// block's scratch.

// The first ROTATED columns are rotated; EACH row has a place of its own, or all have one.
template <typename T, bool BIAS, int PARTS, int FEATURES, int ROTATED, bool EACH>
struct Rotated {
  Epilogue<T, BIAS, 0, false, false, PARTS> before;
  const int* places;     // [m], or the first is that of all
  const float* periods;  // [FEATURES / 2]
};

// Where the i-th column of all first halves stands.
template <int FEATURES>
METAL_FUNC int column_of_half(int i) {
  return i / (FEATURES / 2) * FEATURES + i % (FEATURES / 2);
}

template <int WIDTH, typename T, bool BIAS, int PARTS, int FEATURES, int ROTATED, bool EACH>
METAL_FUNC int column_of_warp(
    Rotated<T, BIAS, PARTS, FEATURES, ROTATED, EACH>, int col, int column, Work work) {
  constexpr int PAIRS = WIDTH / 2;
  const int own = col / 2 + TILE_N * (column % PAIRS);
  return own < work.n / 2 ? column_of_half<FEATURES>(own) + column / PAIRS * (FEATURES / 2)
                          : work.n;
}

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

// As ../lib/epilogue.metal has it for results of their own.
template <
    int TILE_M,
    int SIMDGROUPS_K,
    int WIDE,
    int SIMDGROUPS,
    typename O,
    typename T,
    bool BIAS,
    int PARTS,
    int FEATURES,
    int ROTATED,
    bool EACH,
    typename R>
METAL_FUNC void store_tile(
    O out,
    Rotated<T, BIAS, PARTS, FEATURES, ROTATED, EACH> epilogue,
    R order,
    const float* scratch,
    Work work,
    Split split,
    int slices,
    int warp,
    int lane_index) {
  static_assert(WIDE % 2 == 0, "a tile has as many columns of both halves of heads");
  constexpr int PAIRS = WIDE / 2;
  constexpr int HALF = FEATURES / 2;
  constexpr int ROWS = TILE_M * SCRATCH_ROW;  // of a slice
  const int rows = min(TILE_M, work.m - split.row);
  for (int line = warp; line < PAIRS * TILE_M; line += SIMDGROUPS) {
    const int column = line / TILE_M;
    const int row = line % TILE_M;
    const int own = split.col / 2 + column * TILE_N + lane_index;
    if (row >= rows || own >= work.n / 2) {
      continue;
    }
    const int col = column_of_half<FEATURES>(own);
    const uint to = output_row(order, split.row + row);
    const uint place = output_place(epilogue.before, to, col, work);
    const float* first = scratch + column * slices * ROWS + row * SCRATCH_ROW + lane_index;
    const float* second = first + PAIRS * slices * ROWS;
    Point point = {
        finished(sum_of_slices(first, slices, ROWS), epilogue.before, place, col),
        finished(sum_of_slices(second, slices, ROWS), epilogue.before, place + HALF, col + HALF)};
    if (col < ROTATED) {
      const float frequency = 1.0f / epilogue.periods[col % FEATURES];
      point = turned(point, epilogue.places[EACH ? to : 0] * frequency);
    }
    store(out, 0, 0, place, point.x);
    store(out, 0, 0, place + HALF, point.y);
  }
}
