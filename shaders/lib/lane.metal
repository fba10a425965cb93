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

// Four consecutive activations by one load. Arrays may start at any element of their
// buffer; packed vectors, unlike ordinary ones, may do so too.
METAL_FUNC half4 load_run(const device half* x, uint offset) {
  return *(const device packed_half4*)(x + offset);
}

METAL_FUNC float4 load_run(const device float* x, uint offset) {
  return *(const device packed_float4*)(x + offset);
}

// bfloat is the upper half of a float: a shift widens it, on every Apple GPU.
METAL_FUNC float4 load_run(const device bfloat* x, uint offset) {
  const ushort4 raw = *(const device packed_ushort4*)(x + offset);
  return as_type<float4>(uint4(raw) << 16);
}

template <int RUNS, typename Run>
METAL_FUNC float sum_of_runs(thread const Run* runs) {
  float4 sum = float4(runs[0]);
  UNROLL for (int i = 1; i < RUNS; ++i) {
    sum += float4(runs[i]);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// The 32 rows of w of one column of tiles, as one lane sees them: its row of each of four fragments.
// A load adds an unsigned 32-bit offset to its buffer at no cost; a pointer takes registers.
template <typename S>
struct WeightTile {
  const device uint32_t* words;
  const device S* scales;
  const device S* biases;
  uint4 first_word;   // of the lane's four rows; packed: of all, in x
  uint4 first_group;  // in scales and biases, likewise
};

template <int GROUP, bool PACKED, typename S>
METAL_FUNC WeightTile<S> weight_tile(
    const device uint32_t* w,
    const device S* scales,
    const device S* biases,
    int col,
    Work work,
    int lane_index) {
  const Lane lane = lane_of(lane_index);
  WeightTile<S> tile = {w, scales, biases, uint4(0), uint4(0)};
  if (PACKED) {
    const int k_tiles = ceil_div(work.k, TILE_K);
    const int groups = ceil_div(k_tiles * TILE_K, GROUP);
    tile.first_word.x = col / TILE_N * k_tiles * TILE_WORDS + 4 * lane_index;
    tile.first_group.x = col / TILE_N * groups * (2 * TILE_N) + 8 * lane.row;
  } else {
    // Rows past the end read the last row: their results are never stored.
    const uint4 rows = uint4(min(col + lane.row + int4(0, 8, 16, 24), int4(work.n - 1)));
    tile.first_word = rows * uint(work.k / 8) + uint(runs_of_group(GROUP) * lane.pair);
    tile.first_group = rows * uint(work.k / GROUP);
  }
  return tile;
}

// words[h][f]: word h of row fragment f, for the step that begins at k.
template <int GROUP, bool PACKED, typename S>
METAL_FUNC void load_words(thread uint4* words, WeightTile<S> tile, uint k) {
  if (PACKED) {
    UNROLL for (int h = 0; h < runs_of_group(GROUP); ++h) {
      const uint word = tile.first_word.x + k * (TILE_WORDS / TILE_K) + h * (TILE_WORDS / 2);
      words[h] = *(const device packed_uint4*)(tile.words + word);
    }
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      const uint word = tile.first_word[f] + k / 8;
      if (GROUP == 32) {
        words[0][f] = tile.words[word];
      } else {
        const uint2 both = *(const device packed_uint2*)(tile.words + word);
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

template <int GROUP, bool PACKED, typename S>
METAL_FUNC Quantizers load_quantizers(WeightTile<S> tile, uint k) {
  Quantizers quantizers;
  if (PACKED) {
    // Interleaved at pack time: scale, bias of the lane's rows in fragments 0, 1, 2, 3.
    const uint pair = tile.first_group.x + k / GROUP * (2 * TILE_N);
    const float4 low = float4(load_run(tile.scales, pair));
    const float4 high = float4(load_run(tile.scales, pair + 4));
    quantizers.scale = float4(low.x, low.z, high.x, high.z);
    quantizers.bias = float4(low.y, low.w, high.y, high.w);
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      const uint group = tile.first_group[f] + k / GROUP;
      quantizers.scale[f] = float(tile.scales[group]);
      quantizers.bias[f] = float(tile.biases[group]);
    }
  }
  return quantizers;
}

// Nibbles s and s + 4 of a word, exactly: 64 + q, or q if SUBTRACT. The last place of 64
// as a half is 1/16, so a nibble in bits 4 to 7 under its exponent counts in ones. As floats
// the difference costs no more than the conversion, which it includes.
template <typename W, bool SUBTRACT>
METAL_FUNC vec<W, 2> decode(uint word, int s) {
  const uint shifted = s == 0 ? word << 4 : word >> (4 * s - 4);
  const half2 codes = as_type<half2>((shifted & 0x00F000F0u) | 0x54005400u);
  const vec<W, 2> result = vec<W, 2>(W(codes.x), W(codes.y));
  return SUBTRACT ? result - W(CODE_OFFSET) : result;
}
