// From codes to weights as a matrix product takes them: two of a row in a register, in the type
// of the activations. Scale and bias enter here, before the product: the weight is rounded once,
// as MLX's own kernels round it, and no product has to wait for another to be scaled.

// What a group says of a lane's four rows.
template <typename T>
struct Quantizers {
  T scale[4];
  T bias[4];  // where BIASED; a zero point where the mode is that
};

template <typename T>
struct Pair {
  T x;
  T y;
};

METAL_FUNC half2 twice(half value) {
  return __half2half2(value);
}

METAL_FUNC bfloat2 twice(bfloat value) {
  return __bfloat162bfloat162(value);
}

// scale * code + bias, or scale * (code - zero point), or scale * code.
template <typename W, typename T, typename T2>
METAL_FUNC uint scaled(T2 codes, T scale, T bias) {
  if (W::MODE == ZERO_POINT) {
    return as_type<uint>(__hmul2(__hsub2(codes, twice(bias)), twice(scale)));
  }
  return as_type<uint>(
      W::BIASED ? __hfma2(codes, twice(scale), twice(bias)) : __hmul2(codes, twice(scale)));
}

// Pair `slot` of a word of four pairs of 4 bits. Under the exponent of 1024 or 64 a code reads
// as that number more; what is subtracted is exact.
template <typename W>
METAL_FUNC half2 codes_of_word(uint word, int slot, half) {
  constexpr int SURPLUS = W::ZERO - W::OFFSET;  // 8 of symmetric codes
  const uint shifted = slot < 2 ? word : word >> 8;
  if (slot % 2 == 0) {
    const uint codes = masked(shifted, 0x000F000Fu, 0x64006400u);
    return __hsub2(as_type<half2>(codes), twice(half(1024 + SURPLUS)));
  }
  const uint codes = masked(shifted, 0x00F000F0u, 0x54005400u);
  return __hsub2(as_type<half2>(codes), twice(half(64 + SURPLUS)));
}

template <typename W>
METAL_FUNC bfloat2 codes_of_word(uint word, int slot, bfloat) {
  constexpr int SURPLUS = W::ZERO - W::OFFSET;
  const uint codes = masked(word >> 4 * slot, 0x000F000Fu, 0x43004300u);
  return __hsub2(as_type<bfloat2>(codes), twice(bfloat(float(128 + SURPLUS))));
}

// All other widths: as half, exactly; a bfloat16 does not hold every code.
template <typename W>
METAL_FUNC uint wide_pair(half2 values, half scale, half bias) {
  if (W::MODE == FLOATING) {
    values = __hmul2(values, twice(half(float(W::FACTOR))));
  }
  return scaled<W>(values, scale, bias);
}

template <typename W>
METAL_FUNC uint wide_pair(half2 values, bfloat scale, bfloat bias) {
  const float2 codes = __half22float2(values);
  const float factor = float(scale) * W::FACTOR;
  const float zero = W::MODE == ZERO_POINT ? float(bias) : 0.0f;
  const float shift = W::MODE == AFFINE ? float(bias) : 0.0f;
  return as_type<uint>(__floats2bfloat162_rn(
      fmaf(codes.x - zero, factor, shift), fmaf(codes.y - zero, factor, shift)));
}

// Pair p of row fragment f.
template <typename W, typename T>
METAL_FUNC uint weights(const uint* words, int f, int p, Quantizers<T> quantizers) {
  const T scale = quantizers.scale[f];
  const T bias = quantizers.bias[f];
  if (W::BITS == 4 && W::MODE != FLOATING) {
    const int word = W::PACKED ? p / 4 * 4 + f : f * Native<W>::WINDOWS + p / 4;
    return scaled<W>(codes_of_word<W>(words[word], p % 4, T()), scale, bias);
  }
  const vec<half, 2> values = decode<W, half, true>(words, f, p);
  return wide_pair<W>(__halves2half2(values.x, values.y), scale, bias);
}

// Bytes are powers of two, or E4M3 where groups are of 16.
template <int GROUP, typename T>
METAL_FUNC T scale_of(uchar bits) {
  return T(GROUP == 16 ? small_float(bits) : power_of_two(bits));
}

template <int GROUP, typename T>
METAL_FUNC T scale_of(T value) {
  return value;
}

// The 32 rows of w of one column of tiles, as one lane sees them.
template <typename S>
struct WeightTile {
  const uint* words;
  const S* scales;
  const S* biases;
  uint rows[4];  // native: the lane's rows of w
  int owner;     // packed: whose words they are
  Lane lane;
};

// Groups along k that a packed row has, padding included.
template <typename W>
METAL_FUNC uint packed_groups(uint k_tiles) {
  return group_at<W>(k_tiles * TILE_K - 1) + 1;
}

template <typename W, typename S>
METAL_FUNC WeightTile<S> weight_tile(
    const uint* w, const S* scales, const S* biases, int col, Work work, Lane lane, uint product) {
  WeightTile<S> tile = {w, scales, biases, {0, 0, 0, 0}, packed_lane(lane), lane};
  if (W::PACKED) {
    constexpr int FACTORS = W::BIASED ? 2 : 1;
    const uint k_tiles = ceil_div(work.k, TILE_K);
    const size_t column = product * ceil_div(work.n, TILE_N) + col / TILE_N;
    tile.words += column * k_tiles * (TILE_N * TILE_K / 32 * W::BITS);
    tile.scales += column * packed_groups<W>(k_tiles) * (FACTORS * TILE_N) + 4 * FACTORS * lane.row;
  } else {
  UNROLL for (int f = 0; f < 4; ++f) {
      // Rows past the end read the last row: their results are never stored.
      tile.rows[f] = product * work.n + min(col + lane.row + 8 * f, work.n - 1);
    }
  }
  return tile;
}

// All codes of the step that begins at k.
template <typename W, bool ALIGNED, typename S>
METAL_FUNC void load_words(uint* words, const WeightTile<S>& tile, int k, Work work) {
  if (W::PACKED) {
    constexpr int LOW = Planes<W>::LOW;
    constexpr int HIGH_WORDS = Planes<W>::HIGH_WORDS;
    const uint* from = tile.words + k / TILE_K * (TILE_N * TILE_K / 32 * W::BITS);
    const int step = k % TILE_K / W::STEP * 32;
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

// Groups that a lane meets in 64 values of k; of groups of 16, one is all its own.
template <typename W>
METAL_FUNC constexpr int groups_of_tile() {
  return W::GROUP == 32 ? 2 : 1;
}

// Scales and biases of a lane's four rows in turn, as they were loaded: only use tells them apart,
// because whoever looks at a number waits for it.
template <typename W, typename S>
struct Numbers {
  static constexpr int FACTORS = W::BIASED ? 2 : 1;
  static constexpr int WORDS = FACTORS * sizeof(S);
  uint words[WORDS];

  METAL_FUNC void set(int i, uint bits) {
    constexpr int EACH = 4 / sizeof(S);
    const uint moved = bits << i % EACH * (8 * sizeof(S));
    words[i / EACH] = i % EACH == 0 ? moved : words[i / EACH] | moved;
  }
};

METAL_FUNC uchar number_of(const uint* words, int i, uchar) {
  return words[i / 4] >> i % 4 * 8;
}

template <typename S>
METAL_FUNC S number_of(const uint* words, int i, S) {
  return as_type<S>(ushort(words[i / 2] >> i % 2 * 16));
}

METAL_FUNC uint bits_of(uchar number) {
  return number;
}

template <typename S>
METAL_FUNC uint bits_of(S number) {
  return as_type<ushort>(number);
}

// The numbers of the group that k is in; packed, they lie together.
template <typename W, bool ALIGNED, typename S>
METAL_FUNC Numbers<W, S> load_numbers(const WeightTile<S>& tile, int k, Work work) {
  Numbers<W, S> result;
  constexpr int FACTORS = Numbers<W, S>::FACTORS;
  const uint group = group_at<W>(k) + (W::SCALED ? tile.lane.pair : 0);
  if (W::PACKED) {
    const S* from = tile.scales + group * (FACTORS * TILE_N);
    if (ALIGNED) {
      load_kept_run<Numbers<W, S>::WORDS>(result.words, from);
    } else {
      UNROLL for (int i = 0; i < 4 * FACTORS; ++i) {
        result.set(i, bits_of(from[i]));
      }
    }
  } else {
    UNROLL for (int f = 0; f < 4; ++f) {
      const uint place = tile.rows[f] * group_at<W>(work.k) + group;
      result.set(FACTORS * f, bits_of(tile.scales[place]));
      if (W::BIASED) {
        result.set(FACTORS * f + FACTORS - 1, bits_of(tile.biases[place]));
      }
    }
  }
  return result;
}

template <typename W, typename T, typename S>
METAL_FUNC Quantizers<T> quantizers_of(const Numbers<W, S>& numbers) {
  constexpr int FACTORS = Numbers<W, S>::FACTORS;
  Quantizers<T> result;
  UNROLL for (int f = 0; f < 4; ++f) {
    result.scale[f] = scale_of<W::GROUP, T>(number_of(numbers.words, FACTORS * f, S()));
    result.bias[f] =
        W::BIASED ? T(number_of(numbers.words, FACTORS * f + FACTORS - 1, S())) : T(0.0f);
  }
  return result;
}

// A weight's own scale: a float32 in the place of biases, as ../lib/lane.metal has it.
template <typename S>
METAL_FUNC float global_scale(const S*) {
  return 1.0f;
}

METAL_FUNC float global_scale(const uchar* biases) {
  const uint bits =
      biases[0] | uint(biases[1]) << 8 | uint(biases[2]) << 16 | uint(biases[3]) << 24;
  return as_type<float>(bits) / (6.0f * 448.0f);
}
