// mpp::tensor_ops::matmul2d_descriptor, and how messages name an operation.
#pragma once
#include "layout.h"
#include "memory_tensor.h"
#include "sentence.h"

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m_size, int n_size,
                                int k_size = metal::dynamic_extent,
                                bool is_left_transposed = false,
                                bool is_right_transposed = false,
                                bool is_relaxed = false,
                                mode chosen_mode = mode::multiply)
      : m(m_size),
        n(n_size),
        k(k_size),
        transpose_left(is_left_transposed),
        transpose_right(is_right_transposed),
        relaxed_precision(is_relaxed),
        matmul_mode(chosen_mode) {}
};

}  // namespace mpp::tensor_ops

namespace emu::tensor {

using Descriptor = mpp::tensor_ops::matmul2d_descriptor;

constexpr Shape shape_of(Descriptor d, Role role) {
  u32 m = u32(d.m), n = u32(d.n), k = u32(d.k);
  if (role == Role::kLeft)
    return d.transpose_left ? Shape{role, k, m, true} : Shape{role, m, k, false};
  if (role == Role::kRight)
    return d.transpose_right ? Shape{role, n, k, true} : Shape{role, k, n, false};
  return {role, m, n, false};
}

constexpr const char* role_name(Role role) {
  if (role == Role::kLeft) return "left operand";
  return role == Role::kRight ? "right operand" : "destination";
}

template <Descriptor d>
constexpr Sentence name_of() {
  Sentence name;
  name << "matmul2d(" << d.m << "," << d.n << ",";
  if (d.k == metal::dynamic_extent)
    name << "dynamic)";
  else
    name << d.k << ")";
  return name;
}
template <Descriptor d>
inline constexpr Sentence name = name_of<d>();

}  // namespace emu::tensor
