// Selects the part of the product that a threadgroup computes; the terms are those of
// mlx_marlin/planning/work. The k tiles of all tiles form one line, with tiles numbered down
// the columns first. A threadgroup owns the contiguous range [begin, end) of this line. Its
// part of one tile is a split. In a batch, the tiles of a product follow those of the product
// before it.

#ifndef UNROLL  // CUDA has its own
#define UNROLL _Pragma("clang loop unroll(full)")
#endif
#define STATIC static constant constexpr const  // a constant of a struct

constant constexpr int TILE_N = 32;  // rows of w, columns of the output
constant constexpr int TILE_K = 64;  // values of k that a simdgroup takes at a time

METAL_FUNC constexpr int k_tile_of_group(int group) {
  return group == 128 ? 128 : TILE_K;
}

struct Work {
  int m;
  int n;
  int k;
  int tile_m;
  uint m_tiles;
  uint k_tiles;         // per tile
  uint group_tiles;     // tiles per group, without the leading whole ones
  uint whole;           // leading tiles, one threadgroup each
  uint ranges;          // per group
  uint slices;          // parts per tile; a tile is cut only between slices
  uint minimum;         // least number of k tiles per split
  uint groups;          // of ranges; tiles are assigned to groups round-robin
  bool ceil_partition;  // ranges of ceil(units / ranges), as in Marlin, not balanced ones
  uint batch;           // number of products
};

// The two arrays of numbers that a kernel receives.
struct Shape {
  int m;
  int n;
  int k;
  int tile_m;
  int m_tiles;
  int k_tiles;
  int group_tiles;
};
struct Schedule {
  int whole;
  int ranges;
  int slices;
  int minimum;
  int groups;
  int ceil_partition;
  int batch;
};

// Reads each array as one struct, so that Metal can preload it.
METAL_FUNC Work read_work(const constant int32_t* shape, const constant int32_t* schedule) {
  const Shape sizes = *(const constant Shape*)shape;
  const Schedule parts = *(const constant Schedule*)schedule;
  Work work;
  work.m = sizes.m;
  work.n = sizes.n;
  work.k = sizes.k;
  work.tile_m = sizes.tile_m;
  work.m_tiles = sizes.m_tiles;
  work.k_tiles = sizes.k_tiles;
  work.group_tiles = sizes.group_tiles;
  work.whole = parts.whole;
  work.ranges = parts.ranges;
  work.slices = parts.slices;
  work.minimum = parts.minimum;
  work.groups = parts.groups;
  work.ceil_partition = parts.ceil_partition != 0;
  work.batch = parts.batch;
  return work;
}

METAL_FUNC uint ceil_div(uint value, uint divisor) {
  return (value + divisor - 1) / divisor;
}

// Returns part * total / parts, rounded down, without exceeding 32 bits: total is divided into
// quotient and remainder first.
METAL_FUNC uint balanced_cut(uint part, uint parts, uint total) {
  return part * (total / parts) + part * (total % parts) / parts;
}

// Returns the first k tile of a range, counted within its group.
METAL_FUNC uint range_cut(uint member, Work work) {
  const uint units = work.group_tiles * work.slices;
  const uint unit = work.ceil_partition ? min(member * ceil_div(units, work.ranges), units)
                                        : balanced_cut(member, work.ranges, units);
  uint k_tile = balanced_cut(unit % work.slices, work.slices, work.k_tiles);
  // A cut that would leave a split below the minimum moves to the border of the tile.
  if (min(k_tile, work.k_tiles - k_tile) < work.minimum) {
    k_tile = 2 * k_tile < work.k_tiles ? 0 : work.k_tiles;
  }
  return unit / work.slices * work.k_tiles + k_tile;
}

// Returns the range of a group that contains a k tile of the group: an estimate, corrected in
// at most a few steps.
METAL_FUNC uint range_owner(uint position, Work work) {
  const float share = float(position) / float(work.group_tiles * work.k_tiles);
  uint member = min(uint(share * float(work.ranges)), work.ranges - 1);
  while (range_cut(member, work) > position) {
    --member;
  }
  while (range_cut(member + 1, work) <= position) {
    ++member;
  }
  return member;
}

struct Range {
  uint begin;
  uint end;
};

// WHOLE: every threadgroup computes one whole tile. The range then needs no division, and no
// registers in the main loop.
template <bool WHOLE>
METAL_FUNC Range range_of_threadgroup(uint index, Work work) {
  Range range;
  if (WHOLE || index < work.whole) {
    range.begin = index * work.k_tiles;
    range.end = range.begin + work.k_tiles;
    return range;
  }
  const uint member = (index - work.whole) / work.groups;
  const uint group = (index - work.whole) % work.groups;
  range.begin = (work.whole + group * work.group_tiles) * work.k_tiles;
  range.end = range.begin;
  if (member < work.ranges) {
    range.end += range_cut(member + 1, work);
    range.begin += range_cut(member, work);
  }
  return range;
}

struct Split {
  int row;       // first row of x and of the output
  int col;       // first row of w, first column of the output
  int slot;      // index among the splits of the tile, in ascending k
  uint product;  // index in the batch
  int k_tile_count;
  int k_start;  // in values of k, a multiple of TILE_K
  int k_stop;
};

// Returns the split that begins at `position`, in the range of threadgroup `index`. The first
// `whole` tiles are TILES_N times as wide as the others. BATCHED: there are several products.
template <int TILES_N, bool WHOLE, int GROUP, bool BATCHED = false>
METAL_FUNC Split split_at(uint position, uint end, uint index, Work work) {
  constexpr int K_TILE = k_tile_of_group(GROUP);
  const uint place = WHOLE ? index : position / work.k_tiles;
  const uint k_idx = WHOLE ? 0 : position % work.k_tiles;
  Split split;
  split.k_tile_count = min(end - position, work.k_tiles - k_idx);
  uint tile = place;
  uint nth = 0;  // index of the tile in its group
  if (!WHOLE && place >= work.whole) {
    nth = (place - work.whole) % work.group_tiles;
    tile = work.whole + nth * work.groups + (place - work.whole) / work.group_tiles;
  }
  uint column = tile / work.m_tiles;
  split.product = 0;
  if (BATCHED) {
    const uint columns = ceil_div(work.n, TILE_N);
    split.product = column / columns;
    column %= columns;
  }
  const uint wide = TILES_N > 1 ? min(column, work.whole / work.m_tiles) : 0;
  split.row = tile % work.m_tiles * work.tile_m;
  split.col = TILE_N * (column + (TILES_N - 1) * wide);
  split.slot = 0;
  if (k_idx > 0) {  // only the first split of a range begins inside a tile
    split.slot = (index - work.whole) / work.groups - range_owner(nth * work.k_tiles, work);
  }
  split.k_start = k_idx * K_TILE;
  split.k_stop = min(int(k_idx + split.k_tile_count) * K_TILE, work.k);
  return split;
}

// The splits of a threadgroup, in the order of its range. L has WHOLE, BATCHED, and SINGLE: every
// threadgroup has one split.
template <typename L, int TILES_N, int GROUP>
struct Splits {
  Work work;
  uint index;  // of the threadgroup
  Range left = range_of_threadgroup<L::WHOLE>(index, work);

  METAL_FUNC bool remain() thread {
    return left.begin < left.end;
  }

  METAL_FUNC Split next() thread {
    const Split split =
        split_at<TILES_N, L::WHOLE, GROUP, L::BATCHED>(left.begin, left.end, index, work);
    left.begin += split.k_tile_count;
    return split;
  }

  // Returns whether a split was the last one. Otherwise waits until all simdgroups have stored it.
  METAL_FUNC bool done() thread {
    if (L::SINGLE) {
      return true;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return false;
  }
};

// Returns the number of splits of the tile that contains an output element.
METAL_FUNC uint splits_of_element(int row, int col, uint product, Work work) {
  const uint column = product * ceil_div(work.n, TILE_N) + col / TILE_N;
  const uint tile = column * work.m_tiles + row / work.tile_m;
  if (tile < work.whole) {
    return 1;
  }
  if (work.ranges == work.group_tiles * work.slices) {  // one range per slice
    return work.slices;
  }
  const uint first = (tile - work.whole) / work.groups * work.k_tiles;
  return range_owner(first + work.k_tiles - 1, work) - range_owner(first, work) + 1;
}

// Position of a simdgroup in its threadgroup. Simdgroups along k take the blocks of TILE_K
// values of a split in turn; a block is one step of 64 values or two of 32. In a wide tile,
// some of them are side by side along n instead.
struct Place {
  int row;     // first row within the tile
  int column;  // index of the TILE_N columns, in a wide tile
  int k_slice;
  int k_slices;  // number of slices of the tile's k
};

template <int SIMDGROUPS_M, int SIMDGROUPS_K, int TILES_N>
METAL_FUNC Place place_of_simdgroup(int simdgroup_index, bool is_wide, int rows) {
  Place place;
  place.k_slices = TILES_N > 1 && is_wide ? SIMDGROUPS_K / TILES_N : SIMDGROUPS_K;
  const int along = simdgroup_index / SIMDGROUPS_M;
  place.row = simdgroup_index % SIMDGROUPS_M * rows;
  place.column = TILES_N > 1 ? along / place.k_slices : 0;
  place.k_slice = TILES_N > 1 ? along % place.k_slices : along;
  return place;
}

METAL_FUNC int first_step(Split split, Place place) {
  return split.k_start + TILE_K * place.k_slice;
}

template <int STEP>
METAL_FUNC int next_step(int k, Place place) {
  const int skip = TILE_K * (place.k_slices - 1);
  return STEP == 32 ? k + 32 + (k % TILE_K == 32 ? skip : 0) : k + TILE_K + skip;
}
