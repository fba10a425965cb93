// Decodes codes to weights as operands of matrix products: two of a row in a register, in the type
// of the activations. Scale and bias are applied here, before the product. The weight is rounded
// once, as in MLX's own kernels, and no product waits for another one to be scaled.

// Scales and biases of a group, for a lane's four rows.
template <typename T>
struct GroupParams {
  T scale[4];
  T bias[4];  // if BIASED; the zero point if the mode is ZERO_POINT
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

// Returns scale * code + bias, scale * (code - zero point), or scale * code.
template <typename W, typename T, typename T2>
METAL_FUNC uint scaled(T2 codes, T scale, T bias) {
  if (W::MODE == ZERO_POINT) {
    return as_type<uint>(__hmul2(__hsub2(codes, twice(bias)), twice(scale)));
  }
  return as_type<uint>(
      W::BIASED ? __hfma2(codes, twice(scale), twice(bias)) : __hmul2(codes, twice(scale)));
}

// Returns pair `slot` of a word of four pairs of 4 bits. With the exponent of 1024 or 64, a code
// reads as that number plus the code. The subtraction is exact. Its constant is given as bits,
// because the compiler would repeat a conversion at every use.
template <typename W>
METAL_FUNC half2 codes_of_word(uint word, int slot, half) {
  constexpr uint SURPLUS = uint(W::ZERO - W::OFFSET);  // 8 for symmetric codes
  const uint shifted = slot < 2 ? word : word >> 8;
  if (slot % 2 == 0) {
    const uint codes = masked(shifted, 0x000F000Fu, 0x64006400u);
    return __hsub2(as_type<half2>(codes), as_type<half2>(0x64006400u + SURPLUS * 0x00010001u));
  }
  const uint codes = masked(shifted, 0x00F000F0u, 0x54005400u);
  return __hsub2(as_type<half2>(codes), as_type<half2>(0x54005400u + SURPLUS * 0x00100010u));
}

template <typename W>
METAL_FUNC bfloat2 codes_of_word(uint word, int slot, bfloat) {
  constexpr uint SURPLUS = uint(W::ZERO - W::OFFSET);
  const uint codes = masked(word >> 4 * slot, 0x000F000Fu, 0x43004300u);
  return __hsub2(as_type<bfloat2>(codes), as_type<bfloat2>(0x43004300u + SURPLUS * 0x00010001u));
}

// Other widths are decoded as half, which is exact; a bfloat16 does not hold every code.
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

// Returns pair p of row fragment f: the codes minus ZERO, or small floats divided by FACTOR.
template <typename W>
METAL_FUNC vec<half, 2> decode(const uint* words, int f, int p) {
  const half2 halves = pair_as_halves<W>(words, f, p);
  const vec<half, 2> values = vec<half, 2>(halves.x, halves.y);
  return W::MODE == FLOATING ? values : values - half(W::ZERO);
}

// Returns pair p of row fragment f for floats of 4 bits. With the lowest exponents of a bfloat16
// they are 2^-126 of their values; both multiplications are exact.
template <typename W>
METAL_FUNC uint four_bit_floats(const uint* words, int f, int p, bfloat scale) {
  const uint sign = pair_at<W>(words, f, p, 12) & 0x80008000u;
  const uint rest = pair_at<W>(words, f, p, 6) & 0x01C001C0u;
  const bfloat2 values = __hmul2(as_type<bfloat2>(sign | rest), as_type<bfloat2>(0x7E807E80u));
  return as_type<uint>(__hmul2(values, twice(scale)));
}

template <typename W>
METAL_FUNC uint four_bit_floats(const uint* words, int f, int p, half scale) {
  const vec<half, 2> values = decode<W>(words, f, p);
  return wide_pair<W>(__halves2half2(values.x, values.y), scale, scale);
}

// Returns pair p of row fragment f as weights.
template <typename W, typename T>
METAL_FUNC uint weights(const uint* words, int f, int p, GroupParams<T> params) {
  const T scale = params.scale[f];
  const T bias = params.bias[f];
  if (W::BITS == 4 && W::MODE != FLOATING) {
    const int word = W::PACKED ? p / 4 * 4 + f : f * Native<W>::WINDOWS + p / 4;
    return scaled<W>(codes_of_word<W>(words[word], p % 4, T()), scale, bias);
  }
  if (W::BITS == 4) {
    return four_bit_floats<W>(words, f, p, scale);
  }
  const vec<half, 2> values = decode<W>(words, f, p);
  return wide_pair<W>(__halves2half2(values.x, values.y), scale, bias);
}

METAL_FUNC float small_float(uchar bits) {
  return float(small_floats(bits).x) * 256.0f;
}

// Scales that are bytes are E4M3 for groups of 16, else powers of two.
template <int GROUP, typename T>
METAL_FUNC T scale_of(uchar bits) {
  return T(GROUP == 16 ? small_float(bits) : power_of_two(bits));
}

template <int GROUP, typename T>
METAL_FUNC T scale_of(T value) {
  return value;
}
