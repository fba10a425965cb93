// Pipeline stages of x in shared memory: what loaders and multipliers share, and the loop of the
// loaders. A stage has 128 values of k of all rows of a tile, in the layout of the multiplier.

constexpr int FRAGMENT_ROWS = 8;
constexpr int STAGE_K = 128;
constexpr int HALVES = STAGE_K / TILE_K;
constexpr int STAGE_PRODUCTS = STAGE_K / 16;
constexpr int LOADERS = 4;  // warps that fill stages
constexpr int BARRIER_BYTES = 8;
// Bytes of the barriers at the beginning of shared memory, enough for 32 stages.
constexpr int BARRIERS_BYTES = 512;

template <int FRAGMENTS>
METAL_FUNC constexpr int stage_bytes() {
  return FRAGMENTS * FRAGMENT_ROWS * STAGE_K * 2;
}

// An index in the ring of stages, and the parity of the number of completed rounds.
template <int STAGES>
struct Turn {
  int stage;
  uint parity;

  METAL_FUNC Turn(uint first) : stage(first % STAGES), parity(first / STAGES & 1) {
  }
  METAL_FUNC void advance(int stages) {
    stage += stages;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

// Addresses of the stages in shared memory, and of their `full` and `empty` barriers.
template <int FRAGMENTS, int STAGES>
struct Ring {
  static_assert(2 * STAGES * BARRIER_BYTES <= BARRIERS_BYTES, "each stage has two barriers");
  Shared barriers;

  METAL_FUNC Shared full(int stage) const {
    return barriers + stage * BARRIER_BYTES;
  }
  METAL_FUNC Shared empty(int stage) const {
    return barriers + (STAGES + stage) * BARRIER_BYTES;
  }
  METAL_FUNC Shared at(int stage) const {
    return barriers + BARRIERS_BYTES + stage * stage_bytes<FRAGMENTS>();
  }
};

// The first k that a lane has of a row in one step, and whether its values are inside the row. The
// padding of a weight is multiplied by zeros.
template <typename W>
METAL_FUNC int first_of_step(int k, int step, Lane lane) {
  return k + step * W::STEP + W::CODES * lane.pair;
}

template <typename W>
METAL_FUNC bool is_inside(int k, int step, Work work, Lane lane) {
  return first_of_step<W>(k, step, lane) + W::CODES <= work.k;
}

// Loads a lane's values of x for one fragment and 64 values of k, in the order of its codes. Past
// the end of a row it loads other values instead of testing, because a conditional load would
// stall.
template <typename W, bool ALIGNED, typename T>
METAL_FUNC void load_tile_of_x(uint* x_values, const T* row, int k, Work work, Lane lane) {
  constexpr int REGISTERS = XValues<W>::REGISTERS;
  UNROLL for (int step = 0; step < TILE_K / W::STEP; ++step) {
    const int own = min(first_of_step<W>(k, step, lane), work.k - W::CODES);
    load_activations<REGISTERS, ALIGNED>(x_values + step * REGISTERS, row + own);
  }
}

// Stores 64 values of k of all fragments. ORDER is the layout of a stage.
template <int FRAGMENTS, typename ORDER, typename W>
METAL_FUNC void store_tile_of_x(
    Shared stage, const uint (*x_values)[TILE_K / 8], int k, int half, Work work, Lane lane) {
  constexpr int PRODUCTS = W::PAIRS / 2;
  UNROLL for (int product = 0; product < TILE_K / 16; ++product) {
    const int step = product / PRODUCTS;
    const bool inside = is_inside<W>(k, step, work, lane);
    uint columns[FRAGMENTS][2];
    UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
      columns_of_x<W>(columns[i], x_values[i] + step * XValues<W>::REGISTERS, product % PRODUCTS);
      UNROLL for (int j = 0; j < 2; ++j) {
        columns[i][j] = inside ? columns[i][j] : 0;
      }
    }
    ORDER::template store<FRAGMENTS>(stage, half * (TILE_K / 16) + product, columns, lane);
  }
}

// Number of pieces of a stage, which loaders take in turn. For more rows, a piece is half a stage,
// because a whole one would need too many registers.
template <int FRAGMENTS>
METAL_FUNC constexpr int pieces_of_stage() {
  return FRAGMENTS <= 3 ? 1 : HALVES;
}

// Loads one loader's pieces of the x of a split. A loader prefetches one piece at a time: with
// several, it would also wait for the loads of the last one. A slot of the ring always has the same
// loader, so that no loader can be a round ahead of another.
template <int FRAGMENTS, int STAGES, typename ORDER, typename W, bool ALIGNED, typename T>
METAL_FUNC void fill_stages(
    Ring<FRAGMENTS, STAGES> ring,
    uint first,
    const T* x,
    IdentityRows row_map,
    Work work,
    Split split,
    int loader,
    int lane_index) {
  constexpr int PIECES = pieces_of_stage<FRAGMENTS>();
  constexpr int PIECE_HALVES = HALVES / PIECES;
  static_assert(STAGES * PIECES % LOADERS == 0, "a place has one loader");
  const Lane lane = lane_of(lane_index);
  const int stages = ceil_div(split.k_stop - split.k_start, STAGE_K);
  uint rows[FRAGMENTS];
  UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
    // Rows past the end read the last row; their results are never stored.
    const uint row = min(split.row + FRAGMENT_ROWS * i + lane.row, work.m - 1);
    rows[i] = input_row(row_map, row) * work.k;
  }
  for (int piece = loader; piece < stages * PIECES; piece += LOADERS) {
    const int nth = piece / PIECES;
    const int half = piece % PIECES * PIECE_HALVES;
    const int k = split.k_start + nth * STAGE_K + half * TILE_K;
    uint x_values[PIECE_HALVES][FRAGMENTS][TILE_K / 8];
    UNROLL for (int h = 0; h < PIECE_HALVES; ++h) {
      UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
        load_tile_of_x<W, ALIGNED>(x_values[h][i], x + rows[i], k + h * TILE_K, work, lane);
      }
    }
    const Turn<STAGES> turn(first + nth);
    if (first + nth >= STAGES) {
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
    }
    UNROLL for (int h = 0; h < PIECE_HALVES; ++h) {
      store_tile_of_x<FRAGMENTS, ORDER, W>(
          ring.at(turn.stage), x_values[h], k + h * TILE_K, half + h, work, lane);
    }
    ORDER::stored();
    warp_sync();
    if (lane_index == 0) {
      barrier_arrive(ring.full(turn.stage));
    }
  }
}
