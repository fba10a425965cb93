// The only file that knows which lane of a warp holds which element; ../lib/lane.metal is its
// counterpart for Metal.
//
// The product is computed transposed, C^T[n, m] = W[n, k] X^T[k, m], in 16x8x16 products, w on the
// left. Lane 4 g + t, with g = 0 to 7 and t = 0 to 3, holds in four registers of two values
//
//   rows g and g + 8 of w, slots 2 t and 2 t + 1; the same rows, slots 2 t + 8 and 2 t + 9
//
// and in two registers row g of x, the same slots. Slots may map to k in any order that is the same
// for w and x. Here a lane has consecutive codes of its rows, as in Metal, and product j of a step
// multiplies its pairs 2 j and 2 j + 1. In the packed layout, rows g, g + 8, g + 16 and g + 24 of a
// tile and the t-th codes of a step belong to one lane of Metal, so CUDA reads the same layout.

struct Lane {
  int row;   // g
  int pair;  // t
};

METAL_FUNC Lane lane_of(int index) {
  return Lane{index >> 2, index & 3};
}

// Returns the Metal lane that owns the words which this lane reads.
METAL_FUNC int packed_lane(Lane lane) {
  return (lane.row >> 2) << 4 | (lane.pair >> 1) << 3 | (lane.row & 3) << 1 | (lane.pair & 1);
}

// Loads COUNT consecutive words, a power of two; one by one if they are not aligned.
template <int COUNT, bool ALIGNED>
METAL_FUNC void load_streamed(uint* words, const uint* from) {
  if (COUNT == 4 && ALIGNED) {
    const Registers v = load_once(from);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  } else if (COUNT == 2 && ALIGNED) {
    const ::uint2 v = __ldg((const ::uint2*)from);
    words[0] = v.x;
    words[1] = v.y;
  } else {
  UNROLL for (int i = 0; i < COUNT; ++i) {
      words[i] = __ldg(from + i);
    }
  }
}

// Loads 1, 2 or 4 words that are read again.
template <int COUNT>
METAL_FUNC void load_kept_words(uint* words, const void* from) {
  if (COUNT == 4) {
    const Registers v = load_kept(from);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  } else if (COUNT == 2) {
    const ::uint2 v = __ldg((const ::uint2*)from);
    words[0] = v.x;
    words[1] = v.y;
  } else {
    words[0] = __ldg((const uint*)from);
  }
}

// Loads a plane's words of one step: [chunk of four words][Metal's lane][word].
template <int WORDS, bool ALIGNED>
METAL_FUNC void load_plane(uint* words, const uint* from, int owner) {
  constexpr int CHUNK = WORDS < 4 ? WORDS : 4;
  UNROLL for (int i = 0; i < WORDS; i += 4) {
    load_streamed<CHUNK, ALIGNED>(words + i, from + 32 * i + CHUNK * owner);
  }
}

// A lane's consecutive values of a row of x in a step, two per register. Pair p consists of the
// value at `first_of_pair` and the value DISTANCE after it.
template <typename W>
struct XValues {
  static constexpr int REGISTERS = W::CODES / 2;
  static constexpr int DISTANCE = !W::PACKED && W::BITS == 4 ? 4 : W::PAIRS;
};

template <typename W>
METAL_FUNC constexpr int first_of_pair(int p) {
  return p / XValues<W>::DISTANCE * (2 * XValues<W>::DISTANCE) + p % XValues<W>::DISTANCE;
}

METAL_FUNC bool is_aligned(const void* array) {
  return (size_t)array % 16 == 0;
}

template <int REGISTERS, bool ALIGNED, typename T>
METAL_FUNC void load_activations(uint* x_values, const T* from) {
  if (ALIGNED) {
    UNROLL for (int i = 0; i < REGISTERS; i += 4) {
      const Registers v = load_kept(from + 2 * i);
      x_values[i] = v.x;
      x_values[i + 1] = v.y;
      x_values[i + 2] = v.z;
      x_values[i + 3] = v.w;
    }
  } else {
    const ushort* values = (const ushort*)from;
    UNROLL for (int i = 0; i < REGISTERS; ++i) {
      x_values[i] = values[2 * i] | uint(values[2 * i + 1]) << 16;
    }
  }
}

// Makes the two registers of x for product j of a step.
template <typename W>
METAL_FUNC void columns_of_x(uint* columns, const uint* x_values, int j) {
  const int first = first_of_pair<W>(2 * j) / 2;
  const int second = first + XValues<W>::DISTANCE / 2;
  columns[0] = __byte_perm(x_values[first], x_values[second], 0x5410);
  columns[1] = __byte_perm(x_values[first], x_values[second], 0x7632);
}

// Returns the index in the warp's scratch of a lane's sum i, of four, for row fragments 2 f and
// 2 f + 1 of w and fragment j of x. The rows of the scratch are rows of x.
METAL_FUNC int index_of_sum(Lane lane, int f, int j, int i) {
  return (8 * j + 2 * lane.pair + (i & 1)) * SCRATCH_ROW + 16 * f + 8 * (i >> 1) + lane.row;
}
