// mpp::tensor_ops::matmul2d by one simdgroup: the last lane to arrive multiplies.
#pragma once
#include "cooperative_tensor.h"

namespace emu::tensor {

// Runtime and Python count it under this number.
constexpr Operations kTensor = Operations(5);

template <int Length>
using Numbers = metal::vec<float, Length>;

// What a float operand keeps with `relaxed_precision`: ten bits of its fraction,
// rounded to nearest even, as in TF32. A model: Apple states no width.
inline float relaxed(float value) {
  uint bits = __builtin_bit_cast(uint, value);
  if ((bits >> 23 & 0xFF) == 0xFF) return value;
  bits += 0xFFF + (bits >> 13 & 1);
  return __builtin_bit_cast(float, bits & ~0x1FFFu);
}

// An operand as a dense matrix of floats.
template <Shape shape, bool is_relaxed, class T>
METAL_FUNC void gather(float* matrix, const T* const* lanes) {
  for (u32 lane = 0; lane < kLanes; ++lane)
    for (u32 i = 0; i < shape.capacity(); ++i) {
      float value = float(lanes[lane][i]);
      if constexpr (is_relaxed && metal::is_same_v<T, float>) value = relaxed(value);
      matrix[table<shape>.index[lane][i]] = value;
    }
}

// d = a * b + d in float, k ascending, product and sum rounded separately.
template <Descriptor d>
METAL_FUNC void multiply_dense(const float* a, const float* b, float* c) {
  using Row = Numbers<16>;
  for (int m = 0; m < d.m; ++m)
    for (int n = 0; n < d.n; n += 16) {
      Row sum;
      __builtin_memcpy(&sum, c + m * d.n + n, sizeof sum);
      for (int k = 0; k < d.k; ++k) {
        Row row;
        __builtin_memcpy(&row, b + k * d.n + n, sizeof row);
        sum += a[m * d.k + k] * row;
      }
      __builtin_memcpy(c + m * d.n + n, &sum, sizeof sum);
    }
}

// The operands of one lane, which lie on its stack while it waits.
template <class A, class B, class C>
struct Operands {
  const A* a;
  const B* b;
  C* c;
};

template <Descriptor d, class A, class B, class C>
inline __attribute__((noinline, no_sanitize("thread"))) void multiply_lanes(
    const Meeting<Operands<A, B, C>>& meeting) {
  constexpr Shape left = shape_of(d, Role::kLeft), right = shape_of(d, Role::kRight);
  constexpr Shape destination = shape_of(d, Role::kDestination);
  const A* a_lanes[kLanes];
  const B* b_lanes[kLanes];
  C* c_lanes[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    Operands<A, B, C> given = meeting.of(lane);
    a_lanes[lane] = given.a, b_lanes[lane] = given.b, c_lanes[lane] = given.c;
  }
  float a[d.m * d.k], b[d.k * d.n], c[d.m * d.n];
  gather<left, d.relaxed_precision>(a, a_lanes);
  gather<right, d.relaxed_precision>(b, b_lanes);
  if constexpr (d.matmul_mode == Descriptor::mode::multiply_accumulate)
    gather<destination, false>(c, c_lanes);
  else
    __builtin_memset(c, 0, sizeof c);
  multiply_dense<d>(a, b, c);
  for (u32 lane = 0; lane < kLanes; ++lane)
    for (u32 i = 0; i < destination.capacity(); ++i)
      c_lanes[lane][i] = C(c[table<destination>.index[lane][i]]);
}

template <Descriptor d, class A, class B, class C>
EMU_MEETING void multiply_cooperative(const Operation& operation, const A* a,
                                      const B* b, C* c) {
  Meeting<Operands<A, B, C>> meeting({a, b, c});
  if (mslemu_arrive_from(&operation, __builtin_return_address(0)))
    multiply_lanes<d>(meeting);
}

}  // namespace emu::tensor

namespace mpp::tensor_ops {

template <matmul2d_descriptor d, class Scope>
class matmul2d {
  static_assert(metal::is_same_v<Scope, metal::execution_simdgroup>,
                "matmul2d is emulated for metal::execution_simdgroup");
  using Role = emu::tensor::Role;
  template <class T, Role role>
  using Tensor = emu::tensor::CooperativeTensor<T, d, role>;

  static constexpr bool is_size(int size) { return size == 16 || size == 32; }
  static constexpr bool kCooperativeInputs = is_size(d.m) && is_size(d.n) &&
                                             is_size(d.k) &&
                                             (d.m == 32 || d.n == 32 || d.k == 32);
  static constexpr emu::Operation operation{emu::tensor::name<d>.text, true,
                                            emu::tensor::kTensor};

 public:
  template <class Left, class Right, class Element>
  METAL_FUNC Tensor<Left, Role::kLeft> get_left_input_cooperative_tensor() const {
    return {};
  }
  template <class Left, class Right, class Element>
  METAL_FUNC Tensor<Right, Role::kRight> get_right_input_cooperative_tensor() const {
    return {};
  }
  // The operands' types are those of tensors here.
  template <class Left, class Right, class Element>
  METAL_FUNC Tensor<Element, Role::kDestination> get_destination_cooperative_tensor()
      const {
    return {};
  }

  template <class A, class B, class C>
  METAL_FUNC void run(const Tensor<A, Role::kLeft>& left,
                      const Tensor<B, Role::kRight>& right,
                      Tensor<C, Role::kDestination>& destination) const {
    static_assert(
        kCooperativeInputs,
        "with two cooperative operands m, n and k are 16 or 32, one of them 32");
    emu::tensor::require_set(left);
    emu::tensor::require_set(right);
    if constexpr (d.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
      emu::tensor::require_set(destination);
    emu::tensor::multiply_cooperative<d>(operation, left.begin(), right.begin(),
                                         destination.begin());
  }

  // Operands in memory: every lane reads its elements of them, zero beyond the sizes.
  template <class A, class Right, class C>
  METAL_FUNC metal::enable_if_t<emu::tensor::is_view<Right>> run(
      const Tensor<A, Role::kLeft>& left, const Right& right,
      Tensor<C, Role::kDestination>& destination) const {
    using B = typename emu::tensor::ViewOf<Right>::element;
    Tensor<B, Role::kRight> loaded;
    loaded.copy_from(right);
    emu::tensor::require_set(left);
    if constexpr (d.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
      emu::tensor::require_set(destination);
    emu::tensor::multiply_cooperative<d>(operation, left.begin(), loaded.begin(),
                                         destination.begin());
  }
  template <class Left, class Right, class C>
  METAL_FUNC
      metal::enable_if_t<emu::tensor::is_view<Left> && emu::tensor::is_view<Right>>
      run(const Left& left, const Right& right,
          Tensor<C, Role::kDestination>& destination) const {
    static_assert(d.k != metal::dynamic_extent,
                  "two operands in memory are emulated for a fixed k");
    Tensor<typename emu::tensor::ViewOf<Left>::element, Role::kLeft> loaded;
    loaded.copy_from(left);
    run(loaded, right, destination);
  }
};

}  // namespace mpp::tensor_ops

METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return ushort(emu::self().lane());
}
