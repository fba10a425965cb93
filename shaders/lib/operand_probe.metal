// Known answers of one 8x8 product of the types that OPERAND has for bfloat: threadgroup k
// computes w[n, k'] = code(n, k) if k' is k, else 0, times x[k', m]. So every product of three
// indices is a result of its own. mlx_marlin/backends/metal/probes.py has the same values.

// Returns w[n, k]: different numbers that need every significant bit, 11 of a half or 8 of a
// bfloat.
METAL_FUNC half probe_code(half, int n, int k) {
  return as_type<half>(ushort(0x5C01 + 2 * (8 * n + k)));  // 256.25, 256.75, ...
}

METAL_FUNC bfloat probe_code(bfloat, int n, int k) {
  return as_type<bfloat>(ushort(0x4181 + 2 * (8 * n + k)));  // 16.125, 16.375, ...
}

// Returns the bits of x[k, m] as a bfloat: with odd significands, from 2^-100 to 2^75, which is
// beyond the range of a half on both sides.
METAL_FUNC ushort probe_value(int k, int m) {
  return ushort((27 + 25 * k) << 7 | 2 * (8 * k + m) + 1);
}

METAL_FUNC bfloat as_operand(bfloat, ushort bits) {
  return as_type<bfloat>(bits);
}

METAL_FUNC float as_operand(float, ushort bits) {
  return as_type<float>(uint(bits) << 16);
}

template <int OPERAND>
METAL_FUNC void operand_probe(device float* out, int k_of_threadgroup, int lane_index) {
  typedef typename Operands<bfloat, OPERAND>::Weight V;
  typedef typename Operands<bfloat, OPERAND>::Activation F;
  const Lane lane = lane_of(lane_index);
  const int first = 2 * lane.pair;
  // The lane's two elements: columns `first` and `first + 1` of its row.
  V codes[2];
  F values[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    const bool is_hot = first + i == k_of_threadgroup;
    codes[i] = is_hot ? probe_code(V(), lane.row, first + i) : V(0.0f);
    values[i] = as_operand(F(), probe_value(lane.row, first + i));
  }
  const simdgroup_matrix<V, 8, 8> w = make_fragment<V>(codes[0], codes[1]);
  const simdgroup_matrix<F, 8, 8> x = make_fragment<F>(values[0], values[1]);
  simdgroup_matrix<float, 8, 8> products = make_fragment<float>(0.0f, 0.0f);
  simdgroup_multiply_accumulate(products, w, x, products);
  UNROLL for (int i = 0; i < 2; ++i) {
    out[64 * k_of_threadgroup + 8 * lane.row + first + i] = products.thread_elements()[i];
  }
}
