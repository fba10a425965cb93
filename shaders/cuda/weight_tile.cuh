// Loads from a weight: addresses of a lane's words and numbers (scales and biases), packed or in
// MLX's layout.

// Scales and biases of a lane's four rows, interleaved, as they were loaded. They are unpacked only
// when they are used, because unpacking waits for the load.
template <typename W, typename S>
struct Numbers {
  static constexpr int FACTORS = W::BIASED ? 2 : 1;
  static constexpr int WORDS = FACTORS * sizeof(S);
  uint words[WORDS];

  METAL_FUNC void set(int i, uint bits) {
    constexpr int EACH = 4 / sizeof(S);
    const uint shifted = bits << i % EACH * (8 * sizeof(S));
    words[i / EACH] = i % EACH == 0 ? shifted : words[i / EACH] | shifted;
  }
};

METAL_FUNC uchar number_of(const uint* words, int i, uchar) {
  return words[i / 4] >> i % 4 * 8;
}

// An arithmetic instruction can take either half of a register as an operand.
METAL_FUNC half number_of(const uint* words, int i, half) {
  const half2 pair = as_type<half2>(words[i / 2]);
  return i % 2 == 0 ? __low2half(pair) : __high2half(pair);
}

METAL_FUNC bfloat number_of(const uint* words, int i, bfloat) {
  const bfloat2 pair = as_type<bfloat2>(words[i / 2]);
  return i % 2 == 0 ? __low2bfloat16(pair) : __high2bfloat16(pair);
}

METAL_FUNC uint bits_of(uchar number) {
  return number;
}

template <typename S>
METAL_FUNC uint bits_of(S number) {
  return as_type<ushort>(number);
}

// The arrays of a weight, of the weights of a batch, or of those of all experts.
template <typename S>
struct Weights {
  const uint* w;
  const S* scales;
  const S* biases;
};

template <typename S>
METAL_FUNC Weights<S> weights(const uint* w, const S* scales, const S* biases) {
  return {w, scales, biases};
}

template <typename S>
METAL_FUNC bool is_aligned(Weights<S> weights) {
  return is_aligned(weights.w) && is_aligned(weights.scales);
}

// A lane's view of the 32 rows of w of one column of tiles.
template <typename S>
struct WeightTile {
  const uint* words;
  const S* scales;
  const S* biases;
  uint rows[4];  // native: the lane's rows of w
  int owner;     // packed: the Metal lane that owns the words
  Lane lane;
};

// Returns the number of groups along k of a packed row, including padding.
template <typename W>
METAL_FUNC uint packed_groups(uint k_tiles) {
  return group_at<W>(k_tiles * TILE_K - 1) + 1;
}

// Returns the number of words of consecutive packed tiles.
template <typename W>
METAL_FUNC constexpr uint words_of_tiles(uint k_tiles) {
  return k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
}

// Whether a lane's words have the same offset in all planes.
template <typename W>
METAL_FUNC constexpr bool in_whole_chunks() {
  return Planes<W>::LOW_WORDS >= 4 && Planes<W>::HIGH_WORDS % 4 == 0;
}

template <typename W, typename S>
METAL_FUNC WeightTile<S> weight_tile(Weights<S> weights, int col, Work work, Lane lane, uint product) {
  WeightTile<S> tile = {
      weights.w, weights.scales, weights.biases, {0, 0, 0, 0}, packed_lane(lane), lane};
  if (W::PACKED) {
    constexpr int FACTORS = W::BIASED ? 2 : 1;
    const uint k_tiles = ceil_div(work.k, TILE_K);
    const size_t column = product * ceil_div(work.n, TILE_N) + col / TILE_N;
    tile.words += column * k_tiles * words_of_tiles<W>(1);
    tile.scales += column * packed_groups<W>(k_tiles) * (FACTORS * TILE_N) + 4 * FACTORS * lane.row;
    if (W::GROUP == 16) {
      tile.scales += lane.pair * (FACTORS * TILE_N);
    }
    if (in_whole_chunks<W>()) {
      tile.words += 4 * tile.owner;
      tile.owner = 0;
    }
  } else {
  UNROLL for (int f = 0; f < 4; ++f) {
      // Rows past the end read the last row; their results are never stored.
      tile.rows[f] = product * work.n + min(col + lane.row + 8 * f, work.n - 1);
    }
  }
  return tile;
}

// Advances the words of a packed tile by whole k tiles, so that the offsets of a warp's next loads
// are the same in every iteration.
template <typename W, typename S>
METAL_FUNC void advance_words(WeightTile<S>& tile, uint k) {
  tile.words += words_of_tiles<W>(k / TILE_K);
}

// Advances the numbers by whole groups.
template <typename W, typename S>
METAL_FUNC void advance_numbers(WeightTile<S>& tile, uint k) {
  tile.scales += group_at<W>(k) * (Numbers<W, S>::FACTORS * TILE_N);
}

// Loads all codes of the step that begins at k.
template <typename W, bool ALIGNED, typename S>
METAL_FUNC void load_words(uint* words, const WeightTile<S>& tile, int k, Work work) {
  if (W::PACKED) {
    constexpr int LOW = Planes<W>::LOW;
    constexpr int HIGH_WORDS = Planes<W>::HIGH_WORDS;
    const uint* from = tile.words + words_of_tiles<W>(uint(k) / TILE_K);
    const int step = uint(k) % TILE_K / W::STEP * 32;
    load_plane<Planes<W>::LOW_WORDS, ALIGNED>(
        words, from + step * Planes<W>::LOW_WORDS, tile.owner);
    if (HIGH_WORDS > 0) {
      load_plane<(HIGH_WORDS > 0 ? HIGH_WORDS : 1), ALIGNED>(
          words + Planes<W>::LOW_WORDS,
          from + TILE_N * TILE_K / 32 * LOW + step * HIGH_WORDS,
          tile.owner);
    }
  } else {
    constexpr int UNIT = Native<W>::UNIT;
    const uint own = Native<W>::BYTES / UNIT * tile.lane.pair + k / 32 * (W::BITS * 4 / UNIT);
    UNROLL for (int f = 0; f < 4; ++f) {
      uint row[Native<W>::WORDS];
      load_row<W>(row, tile.words, tile.rows[f] * (work.k / 8 * W::BITS / UNIT) + own);
      make_windows<W>(words + f * Native<W>::WINDOWS, row);
    }
  }
}

// Returns the number of groups of a lane in 64 values of k; a group of 16 belongs to one lane.
template <typename W>
METAL_FUNC constexpr int groups_of_tile() {
  return W::GROUP == 32 ? 2 : 1;
}

// Loads the numbers of the group that contains k; in packed weights they are contiguous.
template <typename W, bool ALIGNED, typename S>
METAL_FUNC Numbers<W, S> load_numbers(const WeightTile<S>& tile, int k, Work work) {
  Numbers<W, S> result;
  constexpr int FACTORS = Numbers<W, S>::FACTORS;
  if (W::PACKED) {
    const S* from = tile.scales + group_at<W>(k) * (FACTORS * TILE_N);
    if (ALIGNED) {
      load_kept_words<Numbers<W, S>::WORDS>(result.words, from);
    } else {
      UNROLL for (int i = 0; i < 4 * FACTORS; ++i) {
        result.set(i, bits_of(from[i]));
      }
    }
  } else {
    const uint group = group_at<W>(k) + (W::GROUP == 16 ? tile.lane.pair : 0);
    UNROLL for (int f = 0; f < 4; ++f) {
      const uint index = tile.rows[f] * group_at<W>(work.k) + group;
      result.set(FACTORS * f, bits_of(tile.scales[index]));
      if (W::BIASED) {
        result.set(FACTORS * f + FACTORS - 1, bits_of(tile.biases[index]));
      }
    }
  }
  return result;
}

template <typename W, typename T, typename S>
METAL_FUNC GroupParams<T> group_params_of(const Numbers<W, S>& numbers) {
  constexpr int FACTORS = Numbers<W, S>::FACTORS;
  GroupParams<T> result;
  UNROLL for (int f = 0; f < 4; ++f) {
    result.scale[f] = scale_of<W::GROUP, T>(number_of(numbers.words, FACTORS * f, S()));
    result.bias[f] =
        W::BIASED ? T(number_of(numbers.words, FACTORS * f + FACTORS - 1, S())) : T(0.0f);
  }
  return result;
}

// Returns the global scale of a weight, as ../lib/weight_tile.metal does.
template <typename S>
METAL_FUNC float global_scale(const S*) {
  return 1.0f;
}

METAL_FUNC float global_scale(const uchar* biases) {
  const uint bits =
      biases[0] | uint(biases[1]) << 8 | uint(biases[2]) << 16 | uint(biases[3]) << 24;
  return as_type<float>(bits) / (6.0f * 448.0f);
}
