// Which part of the product a threadgroup computes. The words are those of plan.py:
// a unit is one slice of k of one tile; units are numbered down the columns of tiles,
// slices of one tile together; a threadgroup owns the contiguous range [begin, end).

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int TILE_N = 32;  // rows of w, columns of the output
constant constexpr int TILE_K = 64;  // values of k that one step of the main loop eats

METAL_FUNC int ceil_div(uint value, uint divisor) {
  return (value + divisor - 1) / divisor;
}

struct Work {
  int m;
  int n;
  int k;
  int k_parallel;       // slices of k in each tile
  bool ceil_partition;  // Marlin's runs of ceil(units / threadgroups) instead of balanced ones
};

METAL_FUNC Work read_work(const constant int32_t* params) {
  Work work;
  work.m = params[0];
  work.n = params[1];
  work.k = params[2];
  work.k_parallel = params[3];
  work.ceil_partition = params[4] != 0;
  return work;
}

struct Range {
  int begin;
  int end;
};

// The first part * total / parts, in 32 bits: total is split into quotient and rest.
METAL_FUNC int balanced_cut(uint part, uint parts, uint total) {
  return part * (total / parts) + part * (total % parts) / parts;
}

template <int TILE_M>
METAL_FUNC Range units_of_threadgroup(int index, int num_threadgroups, Work work) {
  const int tiles = ceil_div(work.m, TILE_M) * ceil_div(work.n, TILE_N);
  const int units = tiles * work.k_parallel;
  Range range;
  if (work.ceil_partition) {
    const int run = ceil_div(units, num_threadgroups);
    range.begin = min(index * run, units);
    range.end = min(range.begin + run, units);
  } else {
    range.begin = balanced_cut(index, num_threadgroups, units);
    range.end = balanced_cut(index + 1, num_threadgroups, units);
  }
  return range;
}

struct Unit {
  int row;  // first row of x and of the output
  int col;  // first row of w, first column of the output
  int split;
  int k_start;  // in values of k, a multiple of TILE_K
  int k_stop;
};

template <int TILE_M, int GROUP>
METAL_FUNC Unit unit_of_index(uint index, Work work) {
  // A slice of k begins where a k tile and a group begin.
  constexpr int CUT = GROUP > TILE_K ? GROUP : TILE_K;
  const uint m_tiles = ceil_div(work.m, TILE_M);
  const uint k_parallel = work.k_parallel;
  const uint tile = index / k_parallel;
  const int cuts = ceil_div(work.k, CUT);
  Unit unit;
  unit.row = tile % m_tiles * TILE_M;
  unit.col = tile / m_tiles * TILE_N;
  unit.split = index % k_parallel;
  unit.k_start = balanced_cut(unit.split, work.k_parallel, cuts) * CUT;
  unit.k_stop = min(balanced_cut(unit.split + 1, work.k_parallel, cuts) * CUT, work.k);
  return unit;
}

// The simdgroups of a threadgroup take turns at the k tiles of a unit; with groups of 32
// a tile has two steps.
METAL_FUNC int first_step(Unit unit, int simdgroup_k) {
  return unit.k_start + TILE_K * simdgroup_k;
}

template <int GROUP, int SIMDGROUPS_K>
METAL_FUNC int next_step(int k) {
  constexpr int SKIP = TILE_K * (SIMDGROUPS_K - 1);
  return GROUP == 32 ? k + 32 + (k % TILE_K == 32 ? SKIP : 0) : k + TILE_K + SKIP;
}
