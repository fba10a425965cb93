// The only file that knows which lane of a simdgroup holds which element.
//
// The product is computed transposed, C^T[n, m] = W[n, k] X^T[k, m], in 8x8 fragments. A lane
// holds two adjacent columns of one row of a fragment:
//
//   lane   0  1  8  9     columns 0-1, 2-3, 4-5, 6-7 of row 0   (pair 0, 1, 2, 3)
//   lane   2  3 10 11     row 1          lane 16 17 24 25     row 4    and so on
//
// A dot product may visit k in any order that is the same for both operands. Here the lane at
// (row, pair) decodes consecutive codes of row `row` of w; those of step t are its two
// operands. This determines the order of k, together with the rule that a fragment must not
// span two quantization groups. In step t = 4 * h + s, fragment column c has this k:
//
//   group 32                       k0 + 4c + t                        steps 0 to 3
//   other groups, native 4 bits    k0 + 16(c/2) + 4(c%2) + 8h + s     steps 0 to 7
//   other groups, all else         k0 + 8c + t                        steps 0 to 7
//
// A lane therefore loads four consecutive activations at once. Native words of 4 bits have a
// different order because their nibbles s and s + 4 are 16 bits apart: see `pair_at`.

// Type of a fragment of activations: half for half, float for all other types. IN_FLOAT: the
// scaled weight needs a float.
template <typename T, bool IN_FLOAT = false>
struct Fragment {
  typedef float type;
};
template <>
struct Fragment<half, false> {
  typedef half type;  // mutant: half_type
};

struct Lane {
  int row;
  int pair;
};

METAL_FUNC Lane lane_of(int index) {
  const int quad = index >> 2;
  Lane lane;
  lane.row = (quad & 4) + ((index >> 1) & 3);  // mutant: lane
  lane.pair = (quad & 2) + (index & 1);
  return lane;
}

// Sums over the lanes that hold one column, or one row, of a fragment.
METAL_FUNC float sum_over_rows(float value) {
  value += simd_shuffle_xor(value, ushort(2));
  value += simd_shuffle_xor(value, ushort(4));  // mutant: sum_rows
  return value + simd_shuffle_xor(value, ushort(16));
}

METAL_FUNC float sum_over_pairs(float value) {
  value += simd_shuffle_xor(value, ushort(1));
  return value + simd_shuffle_xor(value, ushort(8));  // mutant: sum_pairs
}

// Returns the first of the four consecutive k of vector h, within a step of the main loop.
template <typename W>
METAL_FUNC int vec4_offset(int fragment_column, int h) {
  const int c = fragment_column;
  if (W::GROUP == 32) {
    return 4 * c;  // mutant: k_order
  }
  return W::PACKED || W::BITS != 4 ? 8 * c + 4 * h : 16 * (c >> 1) + 4 * (c & 1) + 8 * h;
}

// Loads four consecutive activations at once. Arrays may begin at any element of their buffer;
// only packed vectors may, too.
METAL_FUNC half4 load_vec4(const device half* x, uint offset) {
  return *(const device packed_half4*)(x + offset);  // mutant: load_half
}

METAL_FUNC float4 load_vec4(const device float* x, uint offset) {
  return *(const device packed_float4*)(x + offset);  // mutant: load_float
}

// A bfloat is the upper half of a float, so a shift widens it on every Apple GPU.
METAL_FUNC float4 load_vec4(const device bfloat* x, uint offset) {
  const ushort4 raw = *(const device packed_ushort4*)(x + offset);  // mutant: load_bfloat
  return as_type<float4>(uint4(raw) << 16);
}

METAL_FUNC uchar4 load_vec4(const device uchar* bytes, uint offset) {
  return *(const device packed_uchar4*)(bytes + offset);  // mutant: load_bytes
}

template <int VEC4S, typename Vec4>
METAL_FUNC float sum_of_x(thread const Vec4* x_vec4) {
  float4 sum = float4(x_vec4[0]);
  UNROLL for (int i = 1; i < VEC4S; ++i) {  // mutant: sum_x
    sum += float4(x_vec4[i]);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// A lane's view of the 32 rows of w of one column of tiles: its row in each of four fragments.
// It consists of offsets, because a load adds an unsigned 32-bit offset to its buffer at no
// cost, and a pointer takes more registers.
template <typename S>
struct WeightTile {
  const device uint32_t* words;
  const device S* scales;
  const device S* biases;
  uint4 first_word;   // native: of the lane's four rows, in units; packed: in x
  uint4 first_group;  // in scales and biases, in the same way
  float weight_scale;  // the weight's own scale, 1 if it has none
};

// Returns the global scale of a weight: a float32 that is passed as `biases`. MLX divides it by
// the largest E2M1 value times the largest E4M3 value.
template <typename S>
METAL_FUNC float global_scale(const device S*) {
  return 1.0f;
}

METAL_FUNC float global_scale(const device uchar* biases) {
  return as_type<float>(load_vec4(biases, 0)) / (6.0f * 448.0f);  // mutant: global_scale
}

// Returns the number of groups along k of a packed row, including padding.
template <typename W>
METAL_FUNC uint packed_groups(uint k_tiles) {
  return group_at<W>(k_tiles * TILE_K - 1) + 1;  // mutant: groups
}

// Returns the number of words and of scales of a weight, which are the strides of the weights
// of a batch.
template <typename W>
METAL_FUNC uint2 weight_size(Work work) {
  if (W::PACKED) {
    constexpr int FACTORS = W::BIASED ? 2 : 1;
    const uint n_tiles = ceil_div(work.n, TILE_N);  // mutant: n_tiles
    const uint k_tiles = ceil_div(work.k, TILE_K);  // mutant: k_tiles
    const uint words = k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
    return n_tiles * uint2(words, packed_groups<W>(k_tiles) * (FACTORS * TILE_N));
  }
  return uint(work.n) * uint2(work.k / 32 * W::BITS, group_at<W>(work.k));
}

// The weights of a batch are contiguous.
template <typename W, typename S>
METAL_FUNC WeightTile<S> weight_tile(
    const device uint32_t* w,
    const device S* scales,
    const device S* biases,
    int col,
    Work work,
    int lane_index,
    uint product = 0) {
  const Lane lane = lane_of(lane_index);
  const float weight_scale = W::GLOBAL ? global_scale(biases) : 1.0f;
  WeightTile<S> tile = {w, scales, biases, uint4(0), uint4(0), weight_scale};
  // mutant: packed
  const int own = W::SCALED ? lane.pair : 0;  // index of the lane's group in a step
  if (W::PACKED) {
    constexpr int FACTORS = W::BIASED ? 2 : 1;
    const int k_tiles = ceil_div(work.k, TILE_K);
    const int groups = packed_groups<W>(k_tiles);
    const uint column = product * ceil_div(work.n, TILE_N) + col / TILE_N;
    tile.first_word.x = column * k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
    tile.first_group.x =
        (column * groups + own) * (FACTORS * TILE_N) + 4 * FACTORS * lane.row;
  } else {
    constexpr int UNIT = Native<W>::UNIT;
    // Rows past the end read the last row; their results are never stored.
    const uint4 rows = product * work.n +  // mutant: native
        uint4(min(col + lane.row + int4(0, 8, 16, 24), int4(work.n - 1)));
    tile.first_word =
        rows * uint(work.k / 8 * W::BITS / UNIT) + uint(Native<W>::BYTES / UNIT * lane.pair);
    tile.first_group = rows * group_at<W>(work.k) + own;
  }
  return tile;
}

// Loads all codes of the step that begins at k, in the order that `pair_at` reads.
template <typename W, typename S>
METAL_FUNC void load_words(thread uint* words, WeightTile<S> tile, uint k, int lane_index) {
  if (W::PACKED) {
    constexpr int LOW = Planes<W>::LOW;
    const uint first = tile.first_word.x + k / TILE_K * (TILE_N * TILE_K / 32 * W::BITS);
    const uint step = k % TILE_K / W::STEP * 32;
    load_plane<Planes<W>::LOW_WORDS>(
        words, tile.words, first + step * Planes<W>::LOW_WORDS, lane_index);
    load_plane<Planes<W>::HIGH_WORDS>(
        words + Planes<W>::LOW_WORDS,  // mutant: high_plane
        tile.words,
        first + TILE_N * TILE_K / 32 * LOW + step * Planes<W>::HIGH_WORDS,
        lane_index);
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      const uint offset = tile.first_word[f] + k / 32 * (W::BITS * 4 / Native<W>::UNIT);
      uint row[Native<W>::WORDS];
      load_row<W>(row, tile.words, offset);
      make_windows<W>(words + f * Native<W>::WINDOWS, row);
    }
  }
}

// Scales and biases of the lane's four rows of w, in the group that contains k.
struct GroupParams {
  float4 scale;
  float4 bias;  // if BIASED
};

// Scales have the dtype of the activations, or are bytes: E4M3 for groups of 16, else E8M0.
template <int GROUP, typename S>
METAL_FUNC float scale_of(S bits) {
  return float(bits);
}

template <int GROUP>
METAL_FUNC float scale_of(uchar bits) {
  // mutant: byte_scale
  return GROUP == 16 ? float(scales_of_small_floats(bits).x) : power_of_two(bits);
}

template <int GROUP, typename R>
METAL_FUNC float4 scales_of(R vec4) {
  return float4(vec4);
}

template <int GROUP>
METAL_FUNC float4 scales_of(uchar4 vec4) {
  if (GROUP != 16) {
    return as_type<float4>(uint4(vec4) << 23);  // mutant: byte_scales
  }
  const half2 low = scales_of_small_floats(as_type<uint>(ushort2(vec4.x, vec4.y)));
  const half2 high = scales_of_small_floats(as_type<uint>(ushort2(vec4.z, vec4.w)));
  return float4(float2(low), float2(high));
}

template <typename W, typename S>
METAL_FUNC GroupParams load_group_params(WeightTile<S> tile, uint k) {
  GroupParams params;
  if (W::PACKED && W::BIASED) {
    // Packing interleaves scale and bias of the lane's rows in fragments 0, 1, 2, 3.
    const uint pair = tile.first_group.x + group_at<W>(k) * (2 * TILE_N);  // mutant: biased
    const float4 low = float4(load_vec4(tile.scales, pair));
    const float4 high = float4(load_vec4(tile.scales, pair + 4));
    params.scale = float4(low.x, low.z, high.x, high.z);
    params.bias = float4(low.y, low.w, high.y, high.w);
    if (W::MODE == ZERO_POINT) {
      params.bias *= -params.scale;
    }
    return params;
  }
  if (W::PACKED) {
    params.bias = float4(0.0f);
    params.scale = scales_of<W::GROUP>(
        load_vec4(tile.scales, tile.first_group.x + group_at<W>(k) * TILE_N));  // mutant: scales
    return params;
  }
  UNROLL for (int f = 0; f < 4; ++f) {
    const uint group = tile.first_group[f] + group_at<W>(k);
    params.scale[f] = scale_of<W::GROUP>(tile.scales[group]);
    params.bias[f] = W::BIASED ? float(tile.biases[group]) : 0.0f;
  }
  return params;
}
