// The only file that knows which lane of a simdgroup holds which element.
//
// The product is computed transposed, C^T[n, m] = W[n, k] X^T[k, m], in 8x8 fragments.
// A lane holds two neighbouring columns of one row of a fragment:
//
//   lane   0  1  8  9     columns 0-1, 2-3, 4-5, 6-7 of row 0   (pair 0, 1, 2, 3)
//   lane   2  3 10 11     row 1          lane 16 17 24 25     row 4    and so on
//
// A dot product may visit k in any order on which both sides agree. Ours lets the lane
// at (row, pair) decode whole 32-bit words of row `row` of w: the nibbles s and s + 4 of
// a word are its two operands in step s. The order of k follows from that and from what
// one fragment may not do, sit in two quantization groups. Fragment column c, step s:
//
//   group 32                   k0 + 4c + s                        one word a lane
//   larger groups, native      k0 + 16(c/2) + 4(c%2) + 8h + s     words h = 0, 1
//   larger groups, packed      k0 + 8c + 4h + s                   words h = 0, 1
//
// so a lane reads runs of four consecutive activations, in the packed order eight.

// A fragment of activations: half stays half, every other type becomes float.
template <typename T>
struct Fragment {
  typedef float type;
};
template <>
struct Fragment<half> {
  typedef half type;
};

constant constexpr float CODE_OFFSET = 64.0f;
constant constexpr int TILE_WORDS = TILE_N * TILE_K / 8;

// Words a lane decodes in one step, and runs of activations it reads: a step stays in a group.
METAL_FUNC constexpr int runs_of_group(int group) {
  return group == 32 ? 1 : 2;
}

struct Lane {
  int row;
  int pair;
};

METAL_FUNC Lane lane_of(int index) {
  const int quad = index >> 2;
  Lane lane;
  lane.row = (quad & 4) + ((index >> 1) & 3);
  lane.pair = (quad & 2) + (index & 1);
  return lane;
}

// Sums over the lanes that hold one column, or one row, of a fragment.
METAL_FUNC float sum_over_rows(float value) {
  value += simd_shuffle_xor(value, ushort(2));
  value += simd_shuffle_xor(value, ushort(4));
  return value + simd_shuffle_xor(value, ushort(16));
}

METAL_FUNC float sum_over_pairs(float value) {
  value += simd_shuffle_xor(value, ushort(1));
  return value + simd_shuffle_xor(value, ushort(8));
}

// The first of the four consecutive k of run h, within a step of the main loop.
template <int GROUP, bool PACKED>
METAL_FUNC int run_offset(int fragment_column, int h) {
  const int c = fragment_column;
  return GROUP == 32 ? 4 * c : PACKED ? 8 * c + 4 * h : 16 * (c >> 1) + 4 * (c & 1) + 8 * h;
}

// Four consecutive activations, by one vector load where the address allows it.
template <bool ALIGNED>
METAL_FUNC half4 load_run(const device half* x) {
  return ALIGNED ? *(const device half4*)x : half4(x[0], x[1], x[2], x[3]);
}

template <bool ALIGNED>
METAL_FUNC float4 load_run(const device float* x) {
  return ALIGNED ? *(const device float4*)x : float4(x[0], x[1], x[2], x[3]);
}

// bfloat is the upper half of a float: a shift widens it, on every Apple GPU.
template <bool ALIGNED>
METAL_FUNC float4 load_run(const device bfloat* x) {
  if (ALIGNED) {
    const uint2 raw = *(const device uint2*)x;
    return float4(
        as_type<float>(raw.x << 16),
        as_type<float>(raw.x & 0xFFFF0000u),
        as_type<float>(raw.y << 16),
        as_type<float>(raw.y & 0xFFFF0000u));
  }
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

template <int RUNS, typename Run>
METAL_FUNC float sum_of_runs(thread const Run* runs) {
  float4 sum = float4(0.0f);
  UNROLL for (int i = 0; i < 4 * RUNS; ++i) {
    sum[i % 4] += float(runs[i / 4][i % 4]);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// Arrays may start at any element of their buffer; a vector load may not.
template <typename P>
METAL_FUNC bool is_aligned(P pointer) {
  return (reinterpret_cast<size_t>(pointer) & 15) == 0;
}

template <bool ALIGNED>
METAL_FUNC uint4 load_four(const device uint32_t* words) {
  return ALIGNED ? *(const device uint4*)words : uint4(words[0], words[1], words[2], words[3]);
}

template <bool ALIGNED>
METAL_FUNC uint2 load_two(const device uint32_t* words) {
  return ALIGNED ? *(const device uint2*)words : uint2(words[0], words[1]);
}

// The 32 rows of w of one unit, as one lane sees them: its row of each of four fragments.
template <typename S>
struct WeightTile {
  const device uint32_t* words;
  const device S* scales;
  const device S* biases;
  int4 row_words;  // native layout: where the lane's four rows begin in words
  int4 row_groups; // native layout: and in scales and biases
};

template <int GROUP, bool PACKED, typename S>
METAL_FUNC WeightTile<S> weight_tile(
    const device uint32_t* w, const device S* scales, const device S* biases, int col, Work work, int lane_index) {
  const Lane lane = lane_of(lane_index);
  WeightTile<S> tile;
  if (PACKED) {
    const int k_tiles = ceil_div(work.k, TILE_K);
    const size_t tile_n = size_t(col / TILE_N);
    tile.words = w + tile_n * k_tiles * TILE_WORDS + 4 * lane_index;
    tile.scales = scales + tile_n * ceil_div(k_tiles * TILE_K, GROUP) * (2 * TILE_N) + 8 * lane.row;
    tile.biases = biases;
  } else {
    const int groups = work.k / GROUP;
    // Rows past the end read the last row: their results are never stored.
    const int4 rows = min(lane.row + int4(0, 8, 16, 24), int4(work.n - 1 - col));
    tile.words = w + size_t(col) * (work.k / 8) + (GROUP == 32 ? lane.pair : 2 * lane.pair);
    tile.scales = scales + size_t(col) * groups;
    tile.biases = biases + size_t(col) * groups;
    tile.row_words = rows * (work.k / 8);
    tile.row_groups = rows * groups;
  }
  return tile;
}

// words[h][f]: word h of row fragment f, for the step that begins at k.
template <int GROUP, bool PACKED, bool ALIGNED, typename S>
METAL_FUNC void load_words(thread uint4* words, WeightTile<S> tile, int k) {
  if (PACKED) {
    const device uint32_t* step = tile.words + k / TILE_K * TILE_WORDS;
    if (GROUP == 32) {
      words[0] = load_four<ALIGNED>(step + k % TILE_K / 32 * (TILE_WORDS / 2));
    } else {
      words[0] = load_four<ALIGNED>(step);
      words[1] = load_four<ALIGNED>(step + TILE_WORDS / 2);
    }
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      const device uint32_t* row = tile.words + tile.row_words[f] + k / 8;
      if (GROUP == 32) {
        words[0][f] = row[0];
      } else {
        const uint2 both = load_two<ALIGNED>(row);
        words[0][f] = both.x;
        words[1][f] = both.y;
      }
    }
  }
}

// Scale and bias of the lane's four rows of w, in the group that holds k.
struct Quantizers {
  float4 scale;
  float4 bias;
};

template <int GROUP, bool PACKED, bool ALIGNED, typename S>
METAL_FUNC Quantizers load_quantizers(WeightTile<S> tile, int k) {
  Quantizers quantizers;
  if (PACKED) {
    // Interleaved at pack time: scale, bias of the lane's rows in fragments 0, 1, 2, 3.
    const device S* pairs = tile.scales + k / GROUP * (2 * TILE_N);
    const float4 low = float4(load_run<ALIGNED>(pairs));
    const float4 high = float4(load_run<ALIGNED>(pairs + 4));
    quantizers.scale = float4(low.x, low.z, high.x, high.z);
    quantizers.bias = float4(low.y, low.w, high.y, high.w);
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      quantizers.scale[f] = float(tile.scales[tile.row_groups[f] + k / GROUP]);
      quantizers.bias[f] = float(tile.biases[tile.row_groups[f] + k / GROUP]);
    }
  }
  return quantizers;
}

// Nibbles s and s + 4 of a word, exactly, as halves: 64 + q, or q if SUBTRACT. The last
// place of 64 is 1/16, so a nibble in bits 4 to 7 under its exponent counts in ones.
template <bool SUBTRACT>
METAL_FUNC half2 decode(uint word, int s) {
  const uint shifted = s == 0 ? word << 4 : word >> (4 * s - 4);
  const half2 codes = as_type<half2>((shifted & 0x00F000F0u) | 0x54005400u);
  return SUBTRACT ? codes - half2(CODE_OFFSET) : codes;
}
