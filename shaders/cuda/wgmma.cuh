// Multiplier for many rows on Hopper: four warps multiply 64 rows of w from registers, as in
// mma.cuh, by up to 64 rows of x from shared memory.

// Sets of fragments of w that a warp holds. With two, it decodes the next set while products read
// the other; larger blocks have registers for one only.
METAL_FUNC constexpr int fragment_sets() {
  return THREADS > 512 ? 1 : 2;
}

struct Warpgroups {
  static constexpr int TOGETHER = 4;  // warps

  // Layout of a stage: matrices of 8 rows and 8 slots, 128 bytes each. The matrices of all
  // fragments of a product are adjacent.
  struct Order {
    template <int FRAGMENTS>
    static METAL_FUNC void store(Shared stage, int product, const uint (*columns)[2], Lane lane) {
      UNROLL for (int i = 0; i < 2 * FRAGMENTS; ++i) {
        const int matrix = (2 * product + i % 2) * FRAGMENTS + i / 2;
        store_word(stage, matrix * 32 + 4 * lane.row + lane.pair, columns[i / 2][i % 2]);
      }
    }
    static METAL_FUNC void stored() {
      stores_visible();
    }
  };

  // Computes one warp's part of a split: every SLICES-th stage, from `slice` on. A warp without
  // columns takes part, because the other three warps need it.
  template <int FRAGMENTS, int SLICES, int STAGES, typename W, bool ALIGNED, typename T, typename S>
  static METAL_FUNC void multiply_stages(
      float (*totals)[FRAGMENTS][4],
      Ring<FRAGMENTS, STAGES> ring,
      uint first,
      const WeightTile<S>& tile,
      bool has_columns,
      Work work,
      Split split,
      int slice,
      int lane_index) {
    constexpr int SETS = fragment_sets();
    constexpr int PRODUCTS = TILE_K / 16;
    constexpr int STEPS = TILE_K / W::STEP;
    // Otherwise a slice could be a round ahead of the slice that used the slot before it.
    static_assert(STAGES % SLICES == 0, "a place has one slice");
    static_assert(SETS == 1 || STAGES > SLICES, "a slice reads a stage while it waits for its next");
    uint rows[SETS][4][4];
    int k = split.k_start + slice * STAGE_K;
    Incoming<SLICES, W, ALIGNED, S> incoming(tile, k, has_columns ? split.k_stop : 0, work);
    Turn<STAGES> turn(first + slice);
    int read = -1;  // a stage whose last products may be incomplete
    while (k < split.k_stop) {
      UNROLL for (int ahead = 0; ahead < incoming.AHEAD; ++ahead) {
        if (ahead > 0 && k >= split.k_stop) {
          break;
        }
        barrier_wait(ring.full(turn.stage), turn.parity);
        const Columns stage = columns_at<FRAGMENTS>(ring.at(turn.stage));
        UNROLL for (int half = 0; half < HALVES; ++half) {
          if (half > 0 && k + half * TILE_K >= split.k_stop) {
            break;
          }
          GroupParams<T> params[STEPS];
          UNROLL for (int step = 0; step < STEPS; ++step) {
            params[step] = incoming.template params<T>(ahead, half, step);
          }
          UNROLL for (int j = 0; j < PRODUCTS; j += 2) {
            uint (*own)[4] = rows[j / 2 % SETS];
            UNROLL for (int i = 0; i < 16; ++i) {
              // Row fragments 2 f and 2 f + 1 of products j and j + 1.
              const int f = i / 4 % 2;
              own[i / 4][i % 4] = incoming.weights(
                  ahead, half, 2 * f + i % 2, 2 * (j + i / 8) + i % 4 / 2, params);
            }
            if (j + 2 == PRODUCTS) {
              incoming.load(ahead, half, work);
            }
            products_begin();
            UNROLL for (int i = 0; i < 4; ++i) {
              const int matrix = 2 * (half * PRODUCTS + j + i / 2) * FRAGMENTS;
              multiply_by_shared(
                  totals[i % 2],
                  own[i],
                  after(stage, matrix * 128),
                  T(),
                  Fragments<FRAGMENTS>());
            }
            products_commit();
            products_wait<SETS - 1>();
            if (SETS > 1 && half == 0 && j == 0 && read >= 0 && lane_index == 0) {
              barrier_arrive(ring.empty(read));
            }
          }
        }
        if (SETS > 1) {
          read = turn.stage;
        } else if (lane_index == 0) {
          barrier_arrive(ring.empty(turn.stage));
        }
        incoming.pass();
        k += SLICES * STAGE_K;
        turn.advance(SLICES);
      }
    }
    products_wait<0>();
    if (SETS > 1 && read >= 0 && lane_index == 0) {
      barrier_arrive(ring.empty(read));
    }
  }
};
