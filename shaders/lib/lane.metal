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

// Types of the two operands of a product: fragments of activations of type T, and of weights.
template <typename T, int OPERAND>
struct Operands {
  typedef float Activation;
  typedef float Weight;
};
template <int OPERAND>
struct Operands<half, OPERAND> {
  typedef half Activation;
  typedef half Weight;
};
template <>
struct Operands<half, FLOAT_WEIGHTS> {
  typedef float Activation;
  typedef float Weight;
};
template <>
struct Operands<bfloat, BFLOAT_CODES> {
  typedef bfloat Activation;
  typedef bfloat Weight;
};
template <>
struct Operands<bfloat, HALF_BY_FLOAT> {
  typedef float Activation;
  typedef half Weight;
};

struct Lane {
  int row;
  int pair;
};

METAL_FUNC Lane lane_of(int index) {
  const int quad = index >> 2;
  Lane lane;
  lane.row = (quad & 4) + ((index >> 1) & 3);
  lane.pair = (quad & 2) + (index & 1);
  return lane;
}

// Sums over the lanes that hold one column, or one row, of a fragment.
METAL_FUNC float sum_over_rows(float value) {
  value += simd_shuffle_xor(value, ushort(2));
  value += simd_shuffle_xor(value, ushort(4));
  return value + simd_shuffle_xor(value, ushort(16));
}

METAL_FUNC float sum_over_pairs(float value) {
  value += simd_shuffle_xor(value, ushort(1));
  return value + simd_shuffle_xor(value, ushort(8));
}

// Returns the first of the four consecutive k of vector h, within a step of the main loop.
template <typename W>
METAL_FUNC int vec4_offset(int fragment_column, int h) {
  const int c = fragment_column;
  if (W::GROUP == 32) {
    return 4 * c;
  }
  return W::PACKED || W::BITS != 4 ? 8 * c + 4 * h : 16 * (c >> 1) + 4 * (c & 1) + 8 * h;
}

// Loads four consecutive activations at once. Arrays may begin at any element of their buffer,
// which only packed vectors allow.
METAL_FUNC half4 load_vec4(const device half* x, uint offset) {
  return *(const device packed_half4*)(x + offset);
}

METAL_FUNC float4 load_vec4(const device float* x, uint offset) {
  return *(const device packed_float4*)(x + offset);
}

// A bfloat is the upper half of a float, so a shift widens it on every Apple GPU.
METAL_FUNC float4 widened(ushort4 bfloats) {
  return as_type<float4>(uint4(bfloats) << 16);
}

METAL_FUNC uchar4 load_vec4(const device uchar* bytes, uint offset) {
  return *(const device packed_uchar4*)(bytes + offset);
}

METAL_FUNC ushort4 load_vec4(const device ushort* words, uint offset) {
  return *(const device packed_ushort4*)(words + offset);
}

METAL_FUNC float4 load_vec4(const device bfloat* x, uint offset) {
  return widened(load_vec4((const device ushort*)x, offset));
}

METAL_FUNC ushort2 load_vec2(const device ushort* words, uint offset) {
  return *(const device packed_ushort2*)(words + offset);
}

// Loads four consecutive activations as what a product takes.
template <typename F, typename T>
METAL_FUNC vec<F, 4> load_operand(F, const device T* x, uint offset) {
  return vec<F, 4>(load_vec4(x, offset));
}

METAL_FUNC vec<bfloat, 4> load_operand(bfloat, const device bfloat* x, uint offset) {
  return as_type<vec<bfloat, 4>>(load_vec4((const device ushort*)x, offset));
}

template <typename Vec4>
METAL_FUNC float4 as_floats(Vec4 values) {
  return float4(values);
}

METAL_FUNC float4 as_floats(vec<bfloat, 4> values) {
  return widened(as_type<ushort4>(values));
}

template <int VEC4S, typename Vec4>
METAL_FUNC float sum_of_x(thread const Vec4* x_vec4) {
  float4 sum = as_floats(x_vec4[0]);
  UNROLL for (int i = 1; i < VEC4S; ++i) {
    sum += as_floats(x_vec4[i]);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}
