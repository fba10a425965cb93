// Decodes codes to values. The bits of a code are placed in the mantissa of a half with a fixed
// exponent. The half is then exactly `offset + code`: with this exponent, the lowest bit of the
// code counts 1.

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

// What lanes multiply. Scale and bias of codes are applied to the sums of a group.
constant constexpr int OFFSET_CODES = 0;   // ZERO + q; the products begin at -ZERO * sum(x)
constant constexpr int EXACT_CODES = 1;    // q: more exact, and slower if it is a half
constant constexpr int HALF_WEIGHTS = 2;   // scale * q, of an E2M1 value and its E4M3 scale
constant constexpr int FLOAT_WEIGHTS = 3;  // scale * q + bias

// Storage format of a weight. GROUP is the number of values of k per group; 0 is a whole row.
// OPERAND is what dot products multiply: codes.
template <int MODE_, int BITS_, int GROUP_, bool PACKED_, int OPERAND_ = EXACT_CODES>
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
  // Whether a group has a bias, which is multiplied by the sum of its activations.
  STATIC bool BIASED = MODE == AFFINE || MODE == ZERO_POINT;
  STATIC int OPERAND = OPERAND_;
  // What fragments hold. A group of 16 belongs to one lane: scale and bias are applied in the
  // fragment. The product of an E2M1 value and its E4M3 scale fits in a half, 3 bits times 4
  // bits; integers need a float.
  STATIC int FRAGMENT = GROUP_ != 16 ? OPERAND_ : MODE == FLOATING ? HALF_WEIGHTS : FLOAT_WEIGHTS;
  // Whether fragments are float whatever x is: a half holds not every number of a codebook.
  STATIC bool IN_FLOAT = FRAGMENT == FLOAT_WEIGHTS || MODE == CODEBOOK;
  // CODES is the number of consecutive codes of a row that a lane has in one step of the main
  // loop. Four lanes share a row of a fragment, and this row must not span two groups.
  STATIC int CODES = GROUP_ == 32 ? 8 : 16;
  STATIC int PAIRS = CODES / 2;
  STATIC int VEC4S = CODES / 8;
  STATIC int STEP = 4 * CODES;
  // Bit offset of a code in its half. OFFSET is the least power of two above all codes, except
  // 64 for 4 bits, which saves a shift.
  STATIC int BIT_OFFSET = BITS_ == 4 ? 4 : 10 - BITS_;
  STATIC int OFFSET = 1 << (10 - BIT_OFFSET);
  // Excess of the decoded half over the value that is scaled, until it is subtracted.
  STATIC int ZERO = MODE == FLOATING || MODE == CODEBOOK ? 0 : OFFSET + (MODE == SYMMETRIC ? 1 << (BITS_ - 1) : 0);
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
