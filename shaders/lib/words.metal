// Positions of a lane's codes in the words that it loads. In one step of the main loop, a lane
// has W::CODES consecutive codes of each of four rows of w. Multiply t takes the pair of codes
// (t, t + W::PAIRS), or the nibbles s and s + 4 of native words of 4 bits. The codes of a pair
// are 16 bits apart in a word and are decoded together, each to a half.

// Packed codes are stored in planes of 1, 2, 4 or 8 bits: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, low
// bits first. HIGH is 0 if there is one plane.
template <typename W>
struct Planes {
  STATIC int LOW = W::BITS == 3 ? 2 : W::BITS & 4 ? 4 : W::BITS;
  STATIC int HIGH = W::BITS - LOW;
  // Words that a lane loads for its four rows in a step.
  STATIC int LOW_WORDS = W::CODES * LOW / 8;
  STATIC int HIGH_WORDS = W::CODES * HIGH / 8;
};

// Native codes of one row that a lane loads in a step. UNIT is the widest unit of bytes to
// which all rows and lanes are aligned.
//
// The first codes of all pairs form a stream of HALF bits, and the second codes form the next
// HALF bits. A window has 16 bits of the first stream in its lower half and the same 16 bits of
// the second stream in its upper half, so that both codes of a pair are shifted and masked
// together. The last window ends with the streams and may overlap the one before it.
template <typename W>
struct Native {
  STATIC int BYTES = W::CODES * W::BITS / 8;
  STATIC int UNIT = BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;
  STATIC int WORDS = (BYTES + 3) / 4;
  STATIC int HALF = W::PAIRS * W::BITS;
  STATIC int WINDOWS = (HALF + 15) / 16;
  // First bit of the last window.
  STATIC int LAST = HALF > 16 ? HALF - 16 : 0;
};

// A lane's own number of the codebook follows the words of codes.
template <typename W>
METAL_FUNC constexpr int words_of_step() {
  return (W::PACKED ? Planes<W>::LOW_WORDS + Planes<W>::HIGH_WORDS : 4 * Native<W>::WINDOWS) +
         (W::MODE == CODEBOOK ? 1 : 0);
}

// Loads up to four consecutive words at once.
template <int COUNT>
METAL_FUNC void load_vector(thread uint* words, const device uint32_t* w, uint offset) {
  if (COUNT == 4) {
    const uint4 loaded = *(const device packed_uint4*)(w + offset);
    words[0] = loaded.x;
    words[1] = loaded.y;
    words[2] = loaded.z;
    words[3] = loaded.w;
  } else if (COUNT == 3) {
    const uint3 loaded = *(const device packed_uint3*)(w + offset);
    words[0] = loaded.x;
    words[1] = loaded.y;
    words[2] = loaded.z;
  } else if (COUNT == 2) {
    const uint2 loaded = *(const device packed_uint2*)(w + offset);
    words[0] = loaded.x;
    words[1] = loaded.y;
  } else if (COUNT == 1) {
    words[0] = w[offset];
  }
}

// Loads a plane's words of one step: [chunk of four words][lane][word].
template <int WORDS>
METAL_FUNC void load_plane(thread uint* words, const device uint32_t* w, uint offset, int lane_index) {
  constexpr int CHUNK = WORDS < 4 ? WORDS : 4;
  UNROLL for (int i = 0; i < WORDS; i += 4) {
    load_vector<CHUNK>(words + i, w, offset + 32 * i + CHUNK * lane_index);
  }
}

template <typename W>
METAL_FUNC void load_row(thread uint* words, const device uint32_t* w, uint offset) {
  constexpr int BYTES = Native<W>::BYTES;
  if (Native<W>::UNIT == 4) {
    load_vector<BYTES / 4>(words, w, offset);
  } else {
    UNROLL for (int i = 0; i < Native<W>::WORDS; ++i) {
      words[i] = 0;
    }
    constexpr int UNIT = Native<W>::UNIT;
    UNROLL for (int i = 0; i < BYTES / UNIT; ++i) {
      const uint piece = UNIT == 2 ? uint(((const device ushort*)w)[offset + i])
                                   : uint(((const device uchar*)w)[offset + i]);
      words[i * UNIT / 4] |= piece << (i * UNIT % 4 * 8);
    }
  }
}

// Returns the 16 bits that begin at `bit`; the upper 16 bits of the result are arbitrary.
METAL_FUNC uint bits_at(thread const uint* words, int bit) {
  const uint low = words[bit / 32] >> (bit % 32);
  return bit % 32 > 16 ? low | words[bit / 32 + 1] << (32 - bit % 32) : low;
}

// Converts a row's words to windows. Words of 4-bit codes already are windows, in their own
// order of k, and so is a word of two streams of 16 bits.
template <typename W>
METAL_FUNC void make_windows(thread uint* windows, thread const uint* words) {
  UNROLL for (int i = 0; i < Native<W>::WINDOWS; ++i) {
    const int begin = min(16 * i, Native<W>::LAST);
    const ushort first = ushort(bits_at(words, begin));
    const ushort second = ushort(bits_at(words, Native<W>::HALF + begin));
    const bool ready = W::BITS == 4 || Native<W>::HALF == 16;
    windows[i] = ready ? words[i] : as_type<uint>(ushort2(first, second));
  }
}

METAL_FUNC uint shifted_to(uint word, int from, int to) {
  return from > to ? word >> (from - to) : word << (to - from);
}

// Returns pair t of row fragment f from a plane of BITS, each code at `bit_offset` of its half.
// A word has consecutive pairs, with the second code 16 bits above the first. Rows share a word
// if one row does not fill it.
template <int BITS, int PAIRS>
METAL_FUNC uint plane_pair(thread const uint* words, int f, int t, int bit_offset) {
  constexpr int IN_WORD = 16 / BITS;
  constexpr int SHARING = IN_WORD > PAIRS ? IN_WORD / PAIRS : 1;
  const int word = SHARING > 1 ? f / SHARING : t / IN_WORD * 4 + f;
  const int slot = SHARING > 1 ? f % SHARING * PAIRS + t : t % IN_WORD;
  return shifted_to(words[word], BITS * slot, bit_offset) & both_halves(ones(BITS) << bit_offset);
}

// The same for a row's windows, where a pair may begin in one window and end in the next.
template <typename W>
METAL_FUNC uint window_pair(thread const uint* windows, int t, int bit_offset) {
  constexpr int LAST = Native<W>::LAST;
  const int bit = W::BITS * t;
  const int i = bit >= LAST ? Native<W>::WINDOWS - 1 : bit / 16;
  const int inside = bit - min(16 * i, LAST);
  const uint mask = both_halves(ones(W::BITS) << bit_offset);
  const uint pair = shifted_to(windows[i], inside, bit_offset);
  if (inside + W::BITS <= 16) {
    return pair & mask;
  }
  const uint upper = both_halves(ones(W::BITS) << (bit_offset + 16 - inside)) & mask;
  return (pair & (mask ^ upper)) | (shifted_to(windows[i + 1], 0, bit_offset + 16 - inside) & upper);
}

// Returns pair t of row fragment f, each code at `bit_offset` of its half.
template <typename W>
METAL_FUNC uint pair_at(thread const uint* words, int f, int t, int bit_offset) {
  constexpr int LOW = Planes<W>::LOW;
  constexpr int HIGH = Planes<W>::HIGH;
  if (W::PACKED) {
    const uint low = plane_pair<LOW, W::PAIRS>(words, f, t, bit_offset);
    // The width is never 0, so that this compiles if there is no second plane.
    const uint high = HIGH == 0 ? 0
                                : plane_pair<(HIGH > 0 ? HIGH : 1), W::PAIRS>(
                                      words + Planes<W>::LOW_WORDS, f, t, bit_offset + LOW);
    return low | high;
  }
  words += f * Native<W>::WINDOWS;
  return window_pair<W>(words, t, bit_offset);
}

// Returns the bits of pair t as two halves, or bfloats, each exactly OFFSET + code.
template <typename W>
METAL_FUNC uint pair_with_offset(thread const uint* words, int f, int t) {
  constexpr int BIAS = W::MANTISSA == 7 ? 127 : 15;  // of the exponent
  constexpr uint EXPONENT = (BIAS + W::MANTISSA - W::BIT_OFFSET) << W::MANTISSA;
  return pair_at<W>(words, f, t, W::BIT_OFFSET) | both_halves(EXPONENT);
}

// Returns pair t as halves, exactly: OFFSET + code, or the value of a small float divided by
// FACTOR, with sign, exponent and mantissa moved to those of a half. The smallest of these are
// subnormal halves. A half multiply keeps them, as MLX's own kernels require. A conversion or a
// matrix multiply may flush them to 0, so multiply by FACTOR first.
template <typename W>
METAL_FUNC half2 pair_as_halves(thread const uint* words, int f, int t) {
  if (W::MODE == FLOATING) {
    constexpr int MANTISSA = W::BITS == 4 ? 9 : 7;
    const uint sign = pair_at<W>(words, f, t, 16 - W::BITS) & 0x80008000u;
    const uint rest = pair_at<W>(words, f, t, MANTISSA) & both_halves(ones(W::BITS - 1) << MANTISSA);
    return as_type<half2>(sign | rest);
  }
  return as_type<half2>(pair_with_offset<W>(words, f, t));
}
