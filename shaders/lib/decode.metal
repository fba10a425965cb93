// From codes to values. A code that lies under the right exponent reads as a half that is
// exactly `offset + code`: the exponent is the one whose last place counts ones there.

constant constexpr int AFFINE = 0;      // scale * q + bias
constant constexpr int SYMMETRIC = 1;   // scale * (q - 2^(BITS - 1))
constant constexpr int FLOATING = 2;    // scale * a float: E2M1 of 4 bits, E4M3 of 8
constant constexpr int ZERO_POINT = 3;  // scale * (q - zero point)
// FLOATING with one scale more for the whole weight.
constant constexpr int GLOBAL_FLOATING = 4;

// How a weight is stored. Groups are counted in weights along k, 0 is a whole row.
template <int MODE_, int BITS_, int GROUP_, bool PACKED_>
struct WeightFormat {
  static constant constexpr const bool GLOBAL = MODE_ == GLOBAL_FLOATING;
  static constant constexpr const int MODE = MODE_ == GLOBAL_FLOATING ? FLOATING : MODE_;
  static constant constexpr const int BITS = BITS_;
  static constant constexpr const int GROUP = GROUP_;
  static constant constexpr const bool PACKED = PACKED_;
  // Whether a group adds a multiple of the sum of its activations.
  // mutant: flags
  static constant constexpr const bool BIASED = MODE_ == AFFINE || MODE_ == ZERO_POINT;
  // Consecutive k of a row that a lane has in one step of the main loop: a fragment, which
  // four such lanes share, must not sit in two groups. Groups of 16 are a lane's own: scale
  // and bias then enter the fragment, which holds the whole weight. A half holds that of a
  // small float, three bits times four; integers need a float.
  static constant constexpr const bool SCALED = GROUP_ == 16;
  static constant constexpr const bool IN_FLOAT = SCALED && MODE != FLOATING;
  static constant constexpr const int CODES = GROUP_ == 32 ? 8 : 16;
  static constant constexpr const int PAIRS = CODES / 2;
  static constant constexpr const int VEC4S = CODES / 8;
  static constant constexpr const int STEP = 4 * CODES;
  // Where a code stands in its half: the offset is the least power of two that no code
  // reaches, but 64 for 4 bits, which spares a shift.
  static constant constexpr const int BIT_OFFSET = BITS_ == 4 ? 4 : 10 - BITS_;
  static constant constexpr const int OFFSET = 1 << (10 - BIT_OFFSET);
  // What a code has too much until it is subtracted.
  static constant constexpr const int ZERO =
      // mutant: symmetric
      MODE == FLOATING ? 0 : OFFSET + (MODE_ == SYMMETRIC ? 1 << (BITS_ - 1) : 0);
  // What a small float is short of as a half: its exponent has another bias.
  static constant constexpr const int FACTOR = MODE != FLOATING ? 1 : BITS_ == 4 ? 1 << 14 : 1 << 8;
};

// The group of a row that holds k.
template <typename W>
METAL_FUNC uint group_at(uint k) {
  // The divisor is never 0, so that a whole row compiles.
  return W::GROUP == 0 ? 0 : k / (W::GROUP == 0 ? 1 : W::GROUP);  // mutant: group
}

METAL_FUNC uint both_halves(uint bits) {
  return bits | bits << 16;  // mutant: both_halves
}

METAL_FUNC uint ones(int count) {
  return (1u << count) - 1;
}

// E8M0: a power of two, 2^(bits - 127).
METAL_FUNC float power_of_two(uchar bits) {
  return as_type<float>(uint(bits) << 23);
}

// Two E4M3, 16 bits apart: their exponents and mantissas under those of a half are 2^-8 of
// the values. As in `pair_as_halves`, the factor comes before any conversion.
METAL_FUNC half2 small_floats(uint bits) {
  return as_type<half2>((bits << 8 & 0x80008000u) | (bits << 7 & 0x3F803F80u));
}
