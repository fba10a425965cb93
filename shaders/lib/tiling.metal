// What the entry points of products take, besides the arrays.

// How simdgroups divide a tile, and threadgroups the product.
template <
    int ROWS_,
    int SIMDGROUPS_M_,
    int SIMDGROUPS_K_,
    int TILES_N_ = 1,
    bool WHOLE_ = true,
    bool BATCHED_ = false>
struct Tiling {
  STATIC int ROWS = ROWS_;                  // of x, per simdgroup
  STATIC int SIMDGROUPS_M = SIMDGROUPS_M_;  // side by side along m; they read the same words
  STATIC int SIMDGROUPS_K = SIMDGROUPS_K_;  // take the blocks of TILE_K values of a split in turn
  STATIC int TILES_N = TILES_N_;  // width of the leading whole tiles in units of TILE_N, or 1
  STATIC bool WHOLE = WHOLE_;     // every threadgroup computes one whole tile
  STATIC bool SINGLE = WHOLE_;
  STATIC bool BATCHED = BATCHED_;  // there are several products, each with its own weight
  STATIC int TILE_M = ROWS_ * SIMDGROUPS_M_;
  STATIC int SIMDGROUPS = SIMDGROUPS_M_ * SIMDGROUPS_K_;
  STATIC int SCRATCH = SIMDGROUPS_K_ * TILE_M * SCRATCH_ROW;
};

// A simdgroup's place in the launch, and the floats that its threadgroup shares.
struct Simdgroup {
  threadgroup float* scratch;
  uint threadgroup_index;
  int index;  // in the threadgroup
  int lane_index;
};
