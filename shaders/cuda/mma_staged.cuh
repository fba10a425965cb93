// Multiplier for a few rows on Hopper: every warp multiplies 16x8x16 fragments as in mma.cuh, but
// loads x from shared memory in fragment order, four registers at once. This costs a fraction of
// loading rows of x from the cache. Up to 24 rows, these products also cost less than those of
// warpgroups, during which a multiprocessor issues no other instruction (docs/lab).

struct Warps {
  static constexpr int TOGETHER = 1;

  // Layout of a stage: [product][two fragments][lane], with two registers of each fragment. If the
  // number of fragments is odd, the last one follows as [two products][lane].
  struct Order {
    static constexpr int BYTES = 32 * 16;

    template <int FRAGMENTS>
    static METAL_FUNC constexpr int of_pair(int product, int i) {
      return (product * (FRAGMENTS / 2) + i / 2) * BYTES;
    }
    template <int FRAGMENTS>
    static METAL_FUNC constexpr int of_last(int product) {
      return (STAGE_PRODUCTS * (FRAGMENTS / 2) + product / 2) * BYTES;
    }
    static METAL_FUNC int of_lane(Lane lane) {
      return 16 * (4 * lane.row + lane.pair);
    }

    template <int FRAGMENTS>
    static METAL_FUNC void store(Shared stage, int product, const uint (*columns)[2], Lane lane) {
      const Shared own = stage + of_lane(lane);
      UNROLL for (int i = 0; i + 1 < FRAGMENTS; i += 2) {
        store_four(own + of_pair<FRAGMENTS>(product, i), columns[i]);
      }
      if (FRAGMENTS % 2) {
        store_two(own + (of_last<FRAGMENTS>(product) + product % 2 * 8), columns[FRAGMENTS - 1]);
      }
    }
    static METAL_FUNC void stored() {
    }
  };

  // Multiplies COUNT fragments of x, from fragment i on, by two row fragments of w.
  template <int COUNT, int FRAGMENTS, typename T>
  static METAL_FUNC void multiply_fragments(
      float (*totals)[FRAGMENTS][4], int i, const uint (*rows)[4], const uint* columns, T) {
    UNROLL for (int each = 0; each < COUNT; ++each) {
      UNROLL for (int f = 0; f < 2; ++f) {
        multiply(totals[f][i + each], rows[f], columns + 2 * each, T());
      }
    }
  }

  // Computes one warp's part of a split: every SLICES-th stage, from `slice` on. A warp without
  // columns takes part, because a stage is empty only when all warps have released it.
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
    constexpr int PRODUCTS = TILE_K / 16;
    constexpr int STEPS = TILE_K / W::STEP;
    static_assert(STAGES % SLICES == 0, "a place has one slice");
    int k = split.k_start + slice * STAGE_K;
    Incoming<SLICES, W, ALIGNED, S> incoming(tile, k, has_columns ? split.k_stop : 0, work);
    Turn<STAGES> turn(first + slice);
    // Advanced by addition: otherwise the assembler would multiply by the bytes of a stage at every
    // use.
    Shared stage = kept(ring.at(turn.stage) + Order::of_lane(lane_of(lane_index)));
    while (k < split.k_stop) {
      UNROLL for (int ahead = 0; ahead < incoming.AHEAD; ++ahead) {
        if (ahead > 0 && k >= split.k_stop) {
          break;
        }
        barrier_wait(ring.full(turn.stage), turn.parity);
        UNROLL for (int half = 0; half < HALVES; ++half) {
          if (half > 0 && k + half * TILE_K >= split.k_stop) {
            break;
          }
          GroupParams<T> params[STEPS];
          UNROLL for (int step = 0; step < STEPS; ++step) {
            params[step] = incoming.template params<T>(ahead, half, step);
          }
          uint last[4];
          UNROLL for (int j = 0; j < PRODUCTS; ++j) {
            const int product = half * PRODUCTS + j;
            uint rows[2][4];
            UNROLL for (int i = 0; i < 8; ++i) {
              rows[i / 4][i % 4] = incoming.weights(
                  ahead, half, i / 4 * 2 + i % 2, 2 * j + i % 4 / 2, params);
            }
            UNROLL for (int i = 0; i + 1 < FRAGMENTS; i += 2) {
              uint columns[4];
              load_four(columns, stage + Order::of_pair<FRAGMENTS>(product, i));
              multiply_fragments<2, FRAGMENTS>(totals, i, rows, columns, T());
            }
            if (FRAGMENTS % 2) {
              if (j % 2 == 0) {
                load_four(last, stage + Order::of_last<FRAGMENTS>(product));
              }
              multiply_fragments<1, FRAGMENTS>(
                  totals, FRAGMENTS - 1, rows, last + j % 2 * 2, T());
            }
          }
          incoming.load(ahead, half, work);
        }
        warp_sync();  // all lanes have read the stage
        if (lane_index == 0) {
          barrier_arrive(ring.empty(turn.stage));
        }
        incoming.pass();
        k += SLICES * STAGE_K;
        const bool wraps = turn.stage + SLICES >= STAGES;
        stage = stage + (wraps ? SLICES - STAGES : SLICES) * stage_bytes<FRAGMENTS>();
        turn.advance(SLICES);
      }
    }
  }
};
