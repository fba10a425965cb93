// Which part of the product a threadgroup computes. The words are those of work.py: k tiles
// of all tiles stand in one line, tiles numbered down the columns first; a threadgroup owns
// the contiguous range [begin, end); what it does for one tile is a split. Several products of
// one shape, each with a weight of its own, stand in the line one after the other.

#ifndef UNROLL  // CUDA has its own
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

constant constexpr int TILE_N = 32;  // rows of w, columns of the output
constant constexpr int TILE_K = 64;  // values of k that one trip of the main loop eats

METAL_FUNC constexpr int k_tile_of_group(int group) {
  return group == 128 ? 128 : TILE_K;  // mutant: k_tile
}

struct Work {
  int m;
  int n;
  int k;
  int tile_m;
  uint m_tiles;
  uint k_tiles;         // of a tile
  uint group_tiles;     // tiles of a group, after the leading whole ones
  uint whole;           // leading tiles, one threadgroup each
  uint ranges;          // of a group
  uint slices;          // parts of a tile between which a cut may fall
  uint minimum;         // k tiles of a split
  uint groups;          // of ranges, with tiles of their own, interleaved
  bool ceil_partition;  // Marlin's runs of ceil(units / ranges) instead of balanced ones
  uint batch;           // products
};

// The numbers that a kernel is handed, in two arrays.
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

// Each array is read at once and as a whole, so that Metal may preload it.
METAL_FUNC Work read_work(const constant int32_t* shape, const constant int32_t* schedule) {
  const Shape sizes = *(const constant Shape*)shape;
  const Schedule parts = *(const constant Schedule*)schedule;
  Work work;
  work.m = sizes.m;  // mutant: shape
  work.n = sizes.n;
  work.k = sizes.k;
  work.tile_m = sizes.tile_m;
  work.m_tiles = sizes.m_tiles;
  work.k_tiles = sizes.k_tiles;
  work.group_tiles = sizes.group_tiles;
  work.whole = parts.whole;
  work.ranges = parts.ranges;  // mutant: schedule
  work.slices = parts.slices;
  work.minimum = parts.minimum;
  work.groups = parts.groups;
  work.ceil_partition = parts.ceil_partition != 0;  // mutant: flags
  work.batch = parts.batch;
  return work;
}

METAL_FUNC uint ceil_div(uint value, uint divisor) {
  return (value + divisor - 1) / divisor;  // mutant: ceil_div
}

// The first part * total / parts, in 32 bits: total is split into quotient and rest.
METAL_FUNC uint balanced_cut(uint part, uint parts, uint total) {
  return part * (total / parts) + part * (total % parts) / parts;  // mutant: balanced_cut
}

// Where a range of a group begins, in k tiles of the group.
METAL_FUNC uint range_cut(uint member, Work work) {
  const uint units = work.group_tiles * work.slices;
  // mutant: range_cut
  const uint unit = work.ceil_partition ? min(member * ceil_div(units, work.ranges), units)
                                        : balanced_cut(member, work.ranges, units);
  uint k_tile = balanced_cut(unit % work.slices, work.slices, work.k_tiles);
  // Too near the border of a tile to leave a split of the minimum: cut there.
  if (min(k_tile, work.k_tiles - k_tile) < work.minimum) {
    k_tile = 2 * k_tile < work.k_tiles ? 0 : work.k_tiles;
  }
  return unit / work.slices * work.k_tiles + k_tile;
}

// Which range of a group has a k tile of it: a guess, and at most a few steps.
METAL_FUNC uint range_owner(uint position, Work work) {
  const float share = float(position) / float(work.group_tiles * work.k_tiles);
  uint member = min(uint(share * float(work.ranges)), work.ranges - 1);
  while (range_cut(member, work) > position) {  // mutant: owner
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

// WHOLE: every threadgroup has one whole tile. What a tile is part of is then known without
// a division, and nothing of it lives on in registers.
template <bool WHOLE>
METAL_FUNC Range range_of_threadgroup(uint index, Work work) {
  Range range;
  if (WHOLE || index < work.whole) {  // mutant: range
    range.begin = index * work.k_tiles;
    range.end = range.begin + work.k_tiles;
    return range;
  }
  const uint member = (index - work.whole) / work.groups;
  const uint group = (index - work.whole) % work.groups;
  range.begin = (work.whole + group * work.group_tiles) * work.k_tiles;
  range.end = range.begin;
  if (member < work.ranges) {  // mutant: member
    range.end += range_cut(member + 1, work);
    range.begin += range_cut(member, work);
  }
  return range;
}

struct Split {
  int row;       // first row of x and of the output
  int col;       // first row of w, first column of the output
  int slot;      // which of the tile's splits it is, in ascending k
  uint product;  // which of several
  int k_tile_count;
  int k_start;  // in values of k, a multiple of TILE_K
  int k_stop;
};

// The split of the threadgroup whose range goes on at `position`. The first `whole` tiles
// are WIDE times as wide as the others. BATCHED: there are several products.
template <int WIDE, bool WHOLE, int GROUP, bool BATCHED = false>
METAL_FUNC Split split_at(uint position, uint end, uint index, Work work) {
  constexpr int K_TILE = k_tile_of_group(GROUP);
  const uint place = WHOLE ? index : position / work.k_tiles;
  const uint k_idx = WHOLE ? 0 : position % work.k_tiles;
  Split split;
  split.k_tile_count = min(end - position, work.k_tiles - k_idx);  // mutant: tile
  uint tile = place;
  uint nth = 0;  // of the group
  if (!WHOLE && place >= work.whole) {
    nth = (place - work.whole) % work.group_tiles;
    tile = work.whole + nth * work.groups + (place - work.whole) / work.group_tiles;
  }
  uint column = tile / work.m_tiles;
  split.product = 0;
  if (BATCHED) {
    const uint columns = ceil_div(work.n, TILE_N);  // mutant: column
    split.product = column / columns;
    column %= columns;
  }
  const uint wide = WIDE > 1 ? min(column, work.whole / work.m_tiles) : 0;
  split.row = tile % work.m_tiles * work.tile_m;
  split.col = TILE_N * (column + (WIDE - 1) * wide);
  split.slot = 0;
  if (k_idx > 0) {  // then it is the first of its range
    // mutant: slot
    split.slot = (index - work.whole) / work.groups - range_owner(nth * work.k_tiles, work);
  }
  split.k_start = k_idx * K_TILE;
  split.k_stop = min(int(k_idx + split.k_tile_count) * K_TILE, work.k);
  return split;
}

// How many splits the tile of an output element has.
METAL_FUNC uint splits_of_element(int row, int col, uint product, Work work) {
  const uint column = product * ceil_div(work.n, TILE_N) + col / TILE_N;  // mutant: splits
  const uint tile = column * work.m_tiles + row / work.tile_m;
  if (tile < work.whole) {
    return 1;
  }
  if (work.ranges == work.group_tiles * work.slices) {  // a range for each slice
    return work.slices;
  }
  const uint first = (tile - work.whole) / work.groups * work.k_tiles;
  // mutant: count
  return range_owner(first + work.k_tiles - 1, work) - range_owner(first, work) + 1;
}

// The simdgroups of a threadgroup take turns at the trips of a split; a trip has two steps
// of 32 or one of 64. In a wide tile some of them stand side by side along n instead.
struct Place {
  int row;     // of the tile
  int column;  // of TILE_N columns, of a wide tile
  int k_slice;
  int k_slices;  // that the tile's k is divided into
};

template <int SIMDGROUPS_M, int SIMDGROUPS_K, int WIDE>
METAL_FUNC Place place_of_simdgroup(int simdgroup_index, bool is_wide, int rows) {
  Place place;
  place.k_slices = WIDE > 1 && is_wide ? SIMDGROUPS_K / WIDE : SIMDGROUPS_K;  // mutant: place
  const int along = simdgroup_index / SIMDGROUPS_M;
  place.row = simdgroup_index % SIMDGROUPS_M * rows;
  place.column = WIDE > 1 ? along / place.k_slices : 0;
  place.k_slice = WIDE > 1 ? along % place.k_slices : along;
  return place;
}

METAL_FUNC int first_step(Split split, Place place) {
  return split.k_start + TILE_K * place.k_slice;  // mutant: first_step
}

template <int STEP>
METAL_FUNC int next_step(int k, Place place) {
  const int skip = TILE_K * (place.k_slices - 1);  // mutant: next_step
  return STEP == 32 ? k + 32 + (k % TILE_K == 32 ? skip : 0) : k + TILE_K + skip;
}
