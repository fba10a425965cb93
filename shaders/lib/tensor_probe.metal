// Known products of one tensor operation: threadgroup k computes w[n, k'] = n + 1 if k' is k, else
// 0, times x[m, k']. So every product of three indices is a result of its own.

constant constexpr int PROBE_ROWS = 32;  // of w, and the k of an operation

// Returns x[m, k]: different whole numbers up to 256 of either sign, which a bfloat holds.
METAL_FUNC float probe_value(int m, int k) {
  const int value = 1 + m + TENSOR_ROWS * (k % 16);
  return k < 16 ? float(value) : -float(value);
}

template <bool ADD, typename T>
METAL_FUNC void tensor_probe(device float* out, int k_of_threadgroup, int lane_index) {
  const Lane lane = lane_of(lane_index);
  half w[32];
  T x[16];
  float products[TENSOR_RESULTS];
  UNROLL for (int i = 0; i < 32; ++i) {
    const int n = 16 * (i / 16) + 8 * (i / 4 % 2) + lane.row;
    const int k = 16 * (i / 8 % 2) + 4 * lane.pair + i % 4;
    w[i] = k == k_of_threadgroup ? half(n + 1) : half(0.0f);
  }
  UNROLL for (int i = 0; i < 16; ++i) {
    const int m = 8 * (i / 4 % 2) + lane.row;
    x[i] = T(probe_value(m, 16 * (i / 8) + 4 * lane.pair + i % 4));
  }
  UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
    const int n = 16 * (i / 8) + 8 * (i / 4 % 2) + lane.row;
    products[i] = float(10000 + TENSOR_ROWS * n + 4 * lane.pair + i % 4);
  }
  tensor_multiply<ADD>(products, w, x);
  UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
    const int n = 16 * (i / 8) + 8 * (i / 4 % 2) + lane.row;
    const int row = k_of_threadgroup * PROBE_ROWS + n;
    out[row * TENSOR_ROWS + 4 * lane.pair + i % 4] = products[i];
  }
}

// Writes what the operand says of each of the lane's elements: whether it is valid, and its two
// indices, the inner one first. The capacity precedes them.
template <typename Operand>
METAL_FUNC void write_layout(thread const Operand& operand, device int* out, int elements) {
  out[0] = int(operand.get_capacity());
  for (int i = 0; i < elements; ++i) {
    const auto index = operand.get_multidimensional_index(ushort(i));
    out[1 + 3 * i] = operand.is_valid_element(ushort(i)) ? 1 : 0;
    out[2 + 3 * i] = int(index[0]);
    out[3 + 3 * i] = int(index[1]);
  }
}

template <typename T>
METAL_FUNC void tensor_layout(device int* out, int lane_index) {
  typedef mpp::tensor_ops::matmul2d_descriptor Descriptor;
  constexpr auto descriptor =
      Descriptor(32, 16, 32, false, true, false, Descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> operation;
  auto left = operation.template get_left_input_cooperative_tensor<half, T, float>();
  auto right = operation.template get_right_input_cooperative_tensor<half, T, float>();
  auto result = operation.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<decltype(left)>,
      metal::remove_addrspace_t<decltype(right)>,
      float>();
  out += 195 * lane_index;  // 97 + 49 + 49
  write_layout(left, out, 32);
  write_layout(right, out + 97, 16);
  write_layout(result, out + 146, 16);
}
