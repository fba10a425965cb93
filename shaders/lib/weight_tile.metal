// Loads from a weight: the addresses of a lane's words, scales and biases, packed or in MLX's
// layout.

// The arrays of a weight, of the weights of a batch, or of those of all experts.
template <typename S>
struct Weights {
  const device uint32_t* w;
  const device S* scales;
  const device S* biases;
};

template <typename S>
METAL_FUNC Weights<S> weights(
    const device uint32_t* w, const device S* scales, const device S* biases) {
  return {w, scales, biases};
}

// A lane's view of the 32 rows of w of one column of tiles: its row in each of four fragments.
// It has the offsets of these rows instead of pointers, because a load adds an unsigned 32-bit
// offset to its buffer at no cost, and a pointer takes more registers.
template <typename S>
struct WeightTile {
  const device uint32_t* words;
  const device S* scales;
  const device S* biases;
  // Packed: in x. Native, in units: of the lane's four rows; or, if the tile has all rows, of the
  // first one and the distance to the next, which takes one register instead of four.
  uint4 first_word;
  uint4 first_group;   // in scales and biases, in the same way; y: factors of a super-block
  float weight_scale;  // the weight's own scale, 1 if it has none
  uint entry;          // bits of the lane's number of the codebook
};

// Returns the global scale of a weight: a float32 that is passed as `biases`. MLX divides it by
// the largest E2M1 value times the largest E4M3 value.
template <typename S>
METAL_FUNC float global_scale(const device S*) {
  return 1.0f;
}

METAL_FUNC float global_scale(const device uchar* biases) {
  return as_type<float>(load_vec4(biases, 0)) / (6.0f * 448.0f);
}

// Returns the number of groups along k of a packed row, including padding.
template <typename W>
METAL_FUNC uint packed_groups(uint k_tiles) {
  return group_at<W>(k_tiles * TILE_K - 1) + 1;
}

// The parameters of 32 rows in a super-block, in words of 16 bits: two bytes to a word, then a
// half for each parameter. Scale and minimum of a group of 16 are the halves of one byte.
template <typename W>
struct SuperBlock {
  STATIC int PARAMETERS = W::BIASED ? 2 : 1;
  STATIC int BYTES = W::GROUP == 16 ? 1 : PARAMETERS;
  // Words of a group, and of all groups.
  STATIC int OF_GROUP = BYTES * TILE_N / 2;
  STATIC int OF_GROUPS = SUPER_BLOCK / (W::GROUP ? W::GROUP : 1) * OF_GROUP;
  STATIC int SIZE = OF_GROUPS + PARAMETERS * TILE_N;
};

// Returns the number of scales of 32 packed rows.
template <typename W>
METAL_FUNC uint packed_scales(uint k_tiles) {
  // A codebook of 32 rows takes the place of 32 scales.
  const uint table = W::MODE == CODEBOOK ? TILE_N : 0;
  if (W::SUPER) {
    return table + k_tiles * TILE_K / SUPER_BLOCK * SuperBlock<W>::SIZE;
  }
  return table + packed_groups<W>(k_tiles) * (W::BIASED ? 2 * TILE_N : TILE_N);
}

// Returns the number of words and of scales of a weight, which are the strides of the weights
// of a batch.
template <typename W>
METAL_FUNC uint2 weight_size(Work work) {
  if (W::PACKED) {
    const uint n_tiles = ceil_div(work.n, TILE_N);
    const uint k_tiles = ceil_div(work.k, TILE_K);
    const uint words = k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
    return n_tiles * uint2(words, packed_scales<W>(k_tiles));
  }
  return uint(work.n) * uint2(work.k / 32 * W::BITS, group_at<W>(work.k));
}

// Returns the bits of the lane's number of a codebook, whose 64 bytes begin at a scale. Lanes from
// 16 on have what follows it, which no lane looks up.
template <typename S>
METAL_FUNC uint codebook_entry(const device S* codebook, uint lane_index) {
  const device ushort* numbers = (const device ushort*)codebook;
  return as_type<uint>(load_vec2(numbers, 2 * lane_index));
}

// Returns the offsets of rows of this size, as `first_word` has them.
template <typename W>
METAL_FUNC uint4 offsets_of_rows(uint4 rows, uint size, uint own) {
  return W::RAGGED ? rows * size + own : uint4(rows.x * size + own, 8 * size, 0u, 0u);
}

// The weights of a batch are contiguous.
template <typename W, typename S>
METAL_FUNC WeightTile<S> weight_tile(
    Weights<S> weights, int col, Work work, int lane_index, uint product = 0) {
  const Lane lane = lane_of(lane_index);
  const float weight_scale = W::GLOBAL ? global_scale(weights.biases) : 1.0f;
  WeightTile<S> tile = {
      weights.w, weights.scales, weights.biases, uint4(0), uint4(0), weight_scale, 0};
  const int own = W::GROUP == 16 ? lane.pair : 0;  // index of the lane's group in a step
  if (W::PACKED) {
    constexpr int FACTORS = W::BIASED ? 2 : 1;
    const int k_tiles = ceil_div(work.k, TILE_K);
    const uint column = product * ceil_div(work.n, TILE_N) + col / TILE_N;
    tile.first_word.x = column * k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
    uint first_scale = column * packed_scales<W>(k_tiles);
    if (W::MODE == CODEBOOK) {
      tile.entry = codebook_entry(tile.scales + first_scale, lane_index);
      first_scale += TILE_N;
    }
    const uint row = 4 * FACTORS * lane.row;
    if (W::SUPER) {
      tile.first_group.x =
          first_scale + own * SuperBlock<W>::OF_GROUP + row * SuperBlock<W>::BYTES / FACTORS / 2;
      tile.first_group.y = first_scale + SuperBlock<W>::OF_GROUPS + row;
    } else {
      tile.first_group.x = first_scale + own * (FACTORS * TILE_N) + row;
    }
  } else {
    constexpr int UNIT = Native<W>::UNIT;
    // Rows past the end read the last row; their results are never stored.
    const uint4 rows =
        product * work.n + uint4(min(col + lane.row + int4(0, 8, 16, 24), int4(work.n - 1)));
    const uint words = work.k / 8 * W::BITS / UNIT;
    tile.first_word = offsets_of_rows<W>(rows, words, Native<W>::BYTES / UNIT * lane.pair);
    tile.first_group = offsets_of_rows<W>(rows, group_at<W>(work.k), own);
  }
  return tile;
}

// Returns the offset of the lane's row in fragment f, of native codes or of their groups.
template <typename W>
METAL_FUNC uint of_row(uint4 first, int f) {
  return W::RAGGED ? first[f] : first.x + f * first.y;
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
        words + Planes<W>::LOW_WORDS,
        tile.words,
        first + TILE_N * TILE_K / 32 * LOW + step * Planes<W>::HIGH_WORDS,
        lane_index);
    if (W::MODE == CODEBOOK) {
      words[words_of_step<W>() - 1] = tile.entry;
    }
  } else {
  UNROLL for (int f = 0; f < 4; ++f) {
      const uint offset = of_row<W>(tile.first_word, f) + k / 32 * (W::BITS * 4 / Native<W>::UNIT);
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
  return GROUP == 16 ? float(scales_of_small_floats(bits).x) : power_of_two(bits);
}

template <int GROUP, typename R>
METAL_FUNC float4 scales_of(R vec4) {
  return float4(vec4);
}

template <int GROUP>
METAL_FUNC float4 scales_of(uchar4 vec4) {
  if (GROUP != 16) {
    return as_type<float4>(uint4(vec4) << 23);
  }
  const half2 low = scales_of_small_floats(as_type<uint>(ushort2(vec4.x, vec4.y)));
  const half2 high = scales_of_small_floats(as_type<uint>(ushort2(vec4.z, vec4.w)));
  return float4(float2(low), float2(high));
}

// Both parameters are interleaved as those of an affine group are.
template <typename W>
METAL_FUNC GroupParams load_super_params(const device ushort* scales, uint group, uint factors) {
  GroupParams params;
  if (W::BIASED) {
    constexpr int BITS = 4 * SuperBlock<W>::BYTES;  // of each of the two
    const uint4 pairs = W::GROUP == 16 ? uint4(as_type<uchar4>(load_vec2(scales, group)))
                                       : uint4(load_vec4(scales, group));
    const half4 low = as_type<half4>(load_vec4(scales, factors));
    const half4 high = as_type<half4>(load_vec4(scales, factors + 4));
    params.scale = float4(pairs & ones(BITS)) * float4(low.x, low.z, high.x, high.z);
    params.bias = float4(pairs >> BITS) * -float4(low.y, low.w, high.y, high.w);
    return params;
  }
  const char4 bytes = as_type<char4>(load_vec2(scales, group));
  params.scale = float4(bytes) * float4(as_type<half4>(load_vec4(scales, factors)));
  params.bias = float4(0.0f);
  return params;
}

// Other scales have no super-blocks. This is never called.
template <typename W, typename S>
METAL_FUNC GroupParams load_super_params(const device S*, uint, uint) {
  return {float4(0.0f), float4(0.0f)};
}

template <typename W, typename S>
METAL_FUNC GroupParams load_group_params(WeightTile<S> tile, uint k) {
  GroupParams params;
  if (W::SUPER) {
    const uint block = k / SUPER_BLOCK * SuperBlock<W>::SIZE;
    const uint group = group_at<W>(k % SUPER_BLOCK) * SuperBlock<W>::OF_GROUP;
    return load_super_params<W>(
        tile.scales, tile.first_group.x + block + group, tile.first_group.y + block);
  }
  if (W::PACKED && W::BIASED) {
    // Packing interleaves scale and bias of the lane's rows in fragments 0, 1, 2, 3.
    const uint pair = tile.first_group.x + group_at<W>(k) * (2 * TILE_N);
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
        load_vec4(tile.scales, tile.first_group.x + group_at<W>(k) * TILE_N));
    return params;
  }
  UNROLL for (int f = 0; f < 4; ++f) {
    const uint group = of_row<W>(tile.first_group, f) + group_at<W>(k);
    params.scale[f] = scale_of<W::GROUP>(tile.scales[group]);
    params.bias[f] = W::BIASED ? float(tile.biases[group]) : 0.0f;
  }
  return params;
}
