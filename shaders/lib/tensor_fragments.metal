// The only file that knows which lane of a simdgroup holds which element of an operand of
// Metal's tensor operations (matmul2d), as M5 has them. The guard checks it before first use.
//
// The product is computed transposed, C^T[n, m] = W[n, k] X^T[k, m], in operations of 32 rows of
// w, 16 rows of x and 32 k. Every operand is made of parts of 16x16, of which a lane has eight
// elements. Element e is at row `row + 8 * (e / 4)` and column `4 * pair + e % 4`, where row and
// pair are those of lane.metal. Rows and columns are those of the array as it lies in memory:
// [n, k] for w, [m, k] for x, [n, m] for the result. The order of the parts:
//
//   w       [n / 16][k / 16]    elements 0-7, 8-15 of n 0-15, then those of n 16-31
//   x       [k / 16]            elements 0-7 of k 0-15, then those of k 16-31
//   result  [n / 16]            elements 0-7 of n 0-15, then those of n 16-31
//
// A lane therefore has four rows of w, `row + 8 * f`, with 8 k each, and the same k of two rows of
// x, `row` and `row + 8`. Its results are those of the same four rows of w, whose scales it has,
// for the rows 4 * pair to 4 * pair + 3 of x. The order of k is that of gemm_register: matrix
// column 4 * pair + s of k part h has the lane's h-th code of pair 4 * operation + s.

constant constexpr int TENSOR_ROWS = 16;     // of x
constant constexpr int TENSOR_RESULTS = 16;  // elements of a lane

// Computes products = w x^T, or adds it to products if ADD.
template <bool ADD, typename T>
METAL_FUNC void tensor_multiply(thread float* products, thread const half* w, thread const T* x) {
  typedef mpp::tensor_ops::matmul2d_descriptor Descriptor;
  constexpr auto descriptor = Descriptor(
      32,
      16,
      32,
      false,
      true,
      false,
      ADD ? Descriptor::mode::multiply_accumulate : Descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> operation;
  auto left = operation.template get_left_input_cooperative_tensor<half, T, float>();
  auto right = operation.template get_right_input_cooperative_tensor<half, T, float>();
  auto result = operation.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<decltype(left)>,
      metal::remove_addrspace_t<decltype(right)>,
      float>();
  UNROLL for (int i = 0; i < 32; ++i) {
    left[i] = w[i];
  }
  UNROLL for (int i = 0; i < 16; ++i) {
    right[i] = x[i];
  }
  if (ADD) {
    UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
      result[i] = products[i];
    }
  }
  operation.run(left, right, result);
  UNROLL for (int i = 0; i < TENSOR_RESULTS; ++i) {
    products[i] = result[i];
  }
}

// Puts the codes of four rows of w in the elements of an operation. V is half: it holds every
// code, and every product of an E2M1 value and its E4M3 scale, exactly.
template <typename W>
METAL_FUNC void
tensor_weights(thread half* elements, thread const uint* words, int operation, float4 scale) {
  UNROLL for (int f = 0; f < 4; ++f) {
    UNROLL for (int s = 0; s < 4; ++s) {
      half2 codes = decode<W, half, W::HAS_OFFSET>(words, f, 4 * operation + s);
      codes = W::FRAGMENT >= HALF_WEIGHTS ? half2(float2(codes) * scale[f]) : codes;
      // Part (n / 16, k / 16) of row f is 2 * (f / 2) + k / 16.
      const int element = 16 * (f / 2) + 4 * (f % 2) + s;
      elements[element] = codes.x;
      elements[element + 8] = codes.y;
    }
  }
}

// The value that the lane with the same pair and the row `4 * (pair % 2) + s` has: a lane's results
// are of the rows 4 * pair + s of x, or of these rows less 8.
METAL_FUNC float from_row_of_result(float value, int s, int lane_index) {
  const Lane lane = lane_of(lane_index);
  const int row = 4 * (lane.pair % 2) + s;
  const int source = (row & 4) * 4 + (lane.pair & 2) * 4 + (row & 3) * 2 + (lane.pair & 1);
  return simd_shuffle(value, ushort(source));
}
