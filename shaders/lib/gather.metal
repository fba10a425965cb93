// Products of experts: many products of one row each, each with one of several weights. A
// threadgroup computes one column of tiles of one expert. It finds the rows that chose the
// expert, so the weight is read once for all of them, or not at all.
//
// DOT_ROWS   tiles of up to this many rows (0, 1 or 2) are dot products, as in gemv, with all
//            simdgroups along k; larger tiles are matrix products, as in gemm_register
//
// L and W are those of gemm_register.

// The rows of a tile: indices of the pairs (row of x, expert) that the threadgroup found.
struct GatheredRows {
  const threadgroup int* pairs;
  const device uint32_t* sources;  // rows of x; not read unless `each` is 0
  uint each;                       // consecutive pairs that have the same row of x
};

// The expert of each pair, the rows of x of pairs, and memory for a tile's pairs.
struct Choices {
  const device uint32_t* experts;
  const device uint32_t* sources;
  const constant int32_t* shape;  // number of pairs, n, k, consecutive pairs with the same row
  threadgroup int* pairs;
};

METAL_FUNC uint input_row(GatheredRows row_map, uint row) {
  const uint pair = row_map.pairs[row];
  return row_map.each == 0 ? row_map.sources[pair] : pair / row_map.each;
}

METAL_FUNC uint output_row(GatheredRows row_map, uint row) {
  return row_map.pairs[row];
}

// Lists up to TILE_M pairs of an expert in ascending order, beginning with pair number `first`.
// All simdgroups count; the first one writes. Returns the number of all pairs of the expert.
template <int TILE_M>
METAL_FUNC int list_pairs(
    threadgroup int* pairs,
    const device uint32_t* experts,
    int count,
    uint expert,
    int first,
    int simdgroup_index,
    int lane_index) {
  int found = 0;
  for (int base = 0; base < count; base += 32) {
    const int pair = base + lane_index;
    const int chosen = pair < count && experts[min(pair, count - 1)] == expert ? 1 : 0;
    const int place = found + simd_prefix_exclusive_sum(chosen) - first;
    if (chosen != 0 && simdgroup_index == 0 && place >= 0 && place < TILE_M) {
      pairs[place] = pair;
    }
    found += simd_sum(chosen);
  }
  return found;
}

METAL_FUNC uint rows_of_slot(GatheredRows, Work work) {
  return work.m;
}

// Offsets of the rows of x of a tile.
template <int ROWS>
struct RowOffsets {
  STATIC int OPERAND = BFLOAT_CODES;
  uint rows[ROWS];
};

template <int ROWS>
METAL_FUNC uint start_of(RowOffsets<ROWS> starts, int row) {
  return starts.rows[row];
}

template <typename W, int ROWS, typename Vec4>
METAL_FUNC void scale_rows(W, RowOffsets<ROWS>, thread Vec4*, uint) {
}

// The number of weights of an expert, if its products have this epilogue.
template <typename E>
struct WeightsOf {
  STATIC int COUNT = 1;
};

// Returns the weights that a simdgroup multiplies by. column: its half, if there are two.
template <typename S>
METAL_FUNC Weights<S> weights_of(Plain, Weights<S> first, int) {
  return first;
}

// Returns the epilogue with the operands of a tile. first: index of its first column.
METAL_FUNC Plain at_column(Plain, ulong) {
  return Plain{};
}

// Computes a tile of ROWS rows as dot products; the simdgroups divide k among them.
template <int ROWS, int SIMDGROUPS, typename W, typename T, typename S, typename O, typename E>
METAL_FUNC void gather_rows(
    const device T* x,
    GatheredRows row_map,
    WeightTile<S> tile,
    device O* out,
    E epilogue,
    Work work,
    Split split,
    Simdgroup simdgroup) {
  const Place place =
      place_of_simdgroup<1, SIMDGROUPS, WeightsOf<E>::COUNT>(simdgroup.index, true, 0);
  RowOffsets<ROWS> starts;
  UNROLL for (int row = 0; row < ROWS; ++row) {
    starts.rows[row] = input_row(row_map, row) * work.k;
  }
  float4 totals[ROWS];
  accumulate_rows<ROWS, typename W::Dots>(totals, x, starts, tile, split, place, simdgroup.lane_index);
  const int corner = simdgroup.index * ROWS * SCRATCH_ROW;
  write_rows<ROWS>(simdgroup.scratch, totals, corner, lane_of(simdgroup.lane_index), starts);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_tile<ROWS, SIMDGROUPS, 1, SIMDGROUPS>(
      out,
      epilogue,
      row_map,
      simdgroup.scratch,
      work,
      split,
      place.k_slices,
      simdgroup.index,
      simdgroup.lane_index);
}

// Returns the offset of an expert's part of an array. It has 64 bits, because the array of all
// experts may have more than 2^32 elements.
METAL_FUNC ulong offset_of_expert(uint expert, uint size) {
  return ulong(expert) * size;
}

template <
    typename L,
    typename W,
    int DOT_ROWS,
    typename T,
    typename S,
    typename O,
    typename E>
METAL_FUNC void gather_register(
    const device T* x,
    Weights<S> first_weights,
    Choices choices,
    device O* out,
    E epilogue,
    Simdgroup simdgroup) {
  constexpr int FRAGMENTS_M = L::ROWS / 8;
  constexpr int TILE_M = L::TILE_M;
  constexpr int SIMDGROUPS = L::SIMDGROUPS;
  const int count = choices.shape[0];
  Work work;
  work.n = choices.shape[1];
  work.k = choices.shape[2];
  const uint n_tiles = ceil_div(work.n, TILE_N);
  const uint expert = simdgroup.threadgroup_index / n_tiles;

  Split split;
  split.row = 0;
  split.col = simdgroup.threadgroup_index % n_tiles * TILE_N;
  split.slot = 0;
  split.k_start = 0;
  split.k_stop = work.k;
  const Lane lane = lane_of(simdgroup.lane_index);
  const Place place = place_of_simdgroup<L::SIMDGROUPS_M, L::SIMDGROUPS_K, WeightsOf<E>::COUNT>(
      simdgroup.index, true, L::ROWS);
  Weights<S> weights = weights_of(epilogue, first_weights, place.column);
  const uint2 size = weight_size<W>(work);
  weights.w += offset_of_expert(expert, size.x);
  weights.scales += offset_of_expert(expert, size.y);
  weights.biases += offset_of_expert(expert, size.y);
  epilogue = at_column(epilogue, offset_of_expert(expert, work.n) + split.col);
  const int corner =
      (simdgroup.index / L::SIMDGROUPS_M * TILE_M + place.row + 2 * lane.pair) * SCRATCH_ROW +
      lane.row;
  const GatheredRows row_map = {choices.pairs, choices.sources, uint(choices.shape[3])};
  float2 totals[4 * FRAGMENTS_M];

  for (int first = 0, found = count; first < found; first += TILE_M) {
    found = list_pairs<TILE_M>(
        choices.pairs,
        choices.experts,
        count,
        expert,
        first,
        simdgroup.index,
        simdgroup.lane_index);
    if (found == 0) {
      break;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    work.m = min(found - first, TILE_M);
    const WeightTile<S> tile = weight_tile<W>(weights, split.col, work, simdgroup.lane_index);
    // All threads found the same number of pairs, so the branches are uniform.
    if (DOT_ROWS >= 1 && work.m == 1) {
      gather_rows<1, SIMDGROUPS, W>(
          x, row_map, tile, out, epilogue, work, split, simdgroup);
    } else if (DOT_ROWS >= 2 && work.m == 2) {
      gather_rows<2, SIMDGROUPS, W>(
          x, row_map, tile, out, epilogue, work, split, simdgroup);
    } else {
      if (work.m > place.row) {
        accumulate<FRAGMENTS_M, W>(
            totals,
            x,
            row_map,
            tile,
            place.row,
            work.n - split.col,
            work,
            split,
            place,
            simdgroup.lane_index);
        write_scratch<FRAGMENTS_M>(simdgroup.scratch, totals, corner);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      store_tile<TILE_M, L::SIMDGROUPS_K, 1, SIMDGROUPS>(
          out,
          epilogue,
          row_map,
          simdgroup.scratch,
          work,
          split,
          place.k_slices,
          simdgroup.index,
          simdgroup.lane_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
