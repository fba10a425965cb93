// Decodes codes to values. The bits of a code are placed in the mantissa of a half, or a bfloat,
// with a fixed exponent. That number is then exactly `offset + code`: with this exponent, the
// lowest bit of the code counts 1. docs/design.md draws the forms of a code.

constant constexpr int AFFINE = 0;      // scale * q + bias
constant constexpr int SYMMETRIC = 1;   // scale * (q - 2^(BITS - 1))
constant constexpr int FLOATING = 2;    // scale * float: E2M1 if BITS is 4, E4M3 if 8
constant constexpr int ZERO_POINT = 3;  // scale * (q - zero point)
// K-quants: AFFINE and SYMMETRIC whose scales are bytes times the factors of a super-block.
constant constexpr int K_AFFINE = 4;
constant constexpr int K_SYMMETRIC = 5;
constant constexpr int CODEBOOK = 6;    // scale * one of 16 numbers
constant constexpr int K_CODEBOOK = 7;  // the same, with super-blocks
// FLOATING with an additional scale for the whole weight.
constant constexpr int GLOBAL_FLOATING = 8;
constant constexpr int SUPER_BLOCK = 256;  // values of k

// What lanes multiply. Scale and bias of codes are applied to the sums of a group. Codes with an
// offset are ZERO + q, and the products begin at -ZERO * sum(x).
constant constexpr int OFFSET_CODES = 0;   // as halves, with the offset that is cheapest to decode
constant constexpr int EXACT_CODES = 1;    // q, without an offset
constant constexpr int LEAST_OFFSET = 2;   // as halves, with the least offset: more exact
constant constexpr int BFLOAT_CODES = 3;   // with the least offset, as bfloats; x is a bfloat too
constant constexpr int HALF_BY_FLOAT = 4;  // with the least offset, as halves; x is a float
constant constexpr int HALF_WEIGHTS = 5;   // scale * q, of an E2M1 value and its E4M3 scale
constant constexpr int FLOAT_WEIGHTS = 6;  // scale * q + bias

// Storage format of a weight. GROUP is the number of values of k per group; 0 is a whole row.
// OPERAND is what dot products multiply: codes. RAGGED: the last tile along n may have fewer than
// 32 rows.
template <
    int MODE_,
    int BITS_,
    int GROUP_,
    bool PACKED_,
    int OPERAND_ = EXACT_CODES,
    bool RAGGED_ = true>
struct WeightFormat {
  STATIC bool GLOBAL = MODE_ == GLOBAL_FLOATING;
  STATIC bool SUPER = MODE_ == K_AFFINE || MODE_ == K_SYMMETRIC || MODE_ == K_CODEBOOK;
  STATIC int MODE = MODE_ == GLOBAL_FLOATING ? FLOATING
                    : MODE_ == K_AFFINE      ? AFFINE
                    : MODE_ == K_SYMMETRIC   ? SYMMETRIC
                    : MODE_ == K_CODEBOOK    ? CODEBOOK
                                             : MODE_;
  STATIC int BITS = BITS_;
  STATIC int GROUP = GROUP_;
  STATIC bool PACKED = PACKED_;
  STATIC bool RAGGED = RAGGED_;
  // Whether a group has a bias, which is multiplied by the sum of its activations.
  STATIC bool BIASED = MODE == AFFINE || MODE == ZERO_POINT;
  STATIC int OPERAND = OPERAND_;
  // What fragments hold. A group of 16 belongs to one lane: scale and bias are applied in the
  // fragment. The product of an E2M1 value and its E4M3 scale fits in a half, 3 bits times 4
  // bits; integers need a float.
  STATIC int FRAGMENT = GROUP_ != 16 ? OPERAND_ : MODE == FLOATING ? HALF_WEIGHTS : FLOAT_WEIGHTS;
  // Whose types fragments have: a half holds not every number of a codebook.
  STATIC int TYPES = MODE == CODEBOOK ? FLOAT_WEIGHTS : FRAGMENT;
  // CODES is the number of consecutive codes of a row that a lane has in one step of the main
  // loop. Four lanes share a row of a fragment, and this row must not span two groups.
  STATIC int CODES = GROUP_ == 32 ? 8 : 16;
  STATIC int PAIRS = CODES / 2;
  STATIC int VEC4S = CODES / 8;
  STATIC int STEP = 4 * CODES;
  // Bits of the mantissa in which a code is placed.
  STATIC int MANTISSA = OPERAND_ == BFLOAT_CODES ? 7 : 10;
  // First bit of a code in it. OFFSET is the least power of two above all codes, except 64 for
  // 4 bits, which saves a shift.
  STATIC int BIT_OFFSET = BITS_ == 4 && OPERAND_ <= EXACT_CODES ? 4 : MANTISSA - BITS_;
  STATIC int OFFSET = 1 << (MANTISSA - BIT_OFFSET);
  // Excess of the decoded half over the value that is scaled, until it is subtracted.
  STATIC int ZERO = MODE == FLOATING || MODE == CODEBOOK
                        ? 0
                        : OFFSET + (MODE == SYMMETRIC ? 1 << (BITS_ - 1) : 0);
  // Whether the products begin at -ZERO * sum(x).
  STATIC bool HAS_OFFSET = ZERO != 0 && FRAGMENT != EXACT_CODES && FRAGMENT < HALF_WEIGHTS;
  // Format of dot products, which multiply floats.
  typedef WeightFormat<
      MODE_,
      BITS_,
      GROUP_,
      PACKED_,
      OPERAND_ == EXACT_CODES ? EXACT_CODES : OFFSET_CODES,
      RAGGED_>
      Dots;
  // Factor from the decoded half to the small float, which has another exponent bias.
  STATIC int FACTOR = MODE != FLOATING ? 1 : BITS_ == 4 ? 1 << 14 : 1 << 8;
};

// Returns the index of the group of a row that contains k.
template <typename W>
METAL_FUNC uint group_at(uint k) {
  // The divisor is never 0, so that this compiles for GROUP == 0.
  return W::GROUP == 0 ? 0 : k / (W::GROUP == 0 ? 1 : W::GROUP);
}

METAL_FUNC uint both_halves(uint bits) {
  return bits | bits << 16;
}

METAL_FUNC uint ones(int count) {
  return (1u << count) - 1;
}

// E8M0: a power of two, 2^(bits - 127).
METAL_FUNC float power_of_two(uchar bits) {
  return as_type<float>(uint(bits) << 23);
}

// Returns two E4M3 values, 16 bits apart, as halves with their exponents and mantissas: 2^-8 of
// the values. As in `pair_as_halves`, multiply by the factor before any conversion.
METAL_FUNC half2 small_floats(uint bits) {
  return as_type<half2>((bits << 8 & 0x80008000u) | (bits << 7 & 0x3F803F80u));
}
