// mpp::tensor_ops::matmul2d by one simdgroup. A descriptor is a number here: clang's C++
// for OpenCL has no class types as template arguments.
#pragma once
#include "memory_tensor.h"

ushort __metal_get_thread_index_in_simdgroup(ushort);

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  ulong number;

  constexpr matmul2d_descriptor(int m, int n, int k = metal::dynamic_extent,
                                bool transpose_left = false,
                                bool transpose_right = false,
                                bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : number(ulong(m) | ulong(n) << 16 | ulong(k + 1) << 32 |
               ulong(transpose_left) << 56 | ulong(transpose_right) << 57 |
               ulong(relaxed_precision) << 58 | ulong(matmul_mode) << 59) {}
  constexpr operator ulong() const { return number; }
  constexpr operator ulong() const constant { return number; }
};

}  // namespace tensor_ops
}  // namespace mpp

namespace emu {

constexpr int size_m(ulong d) { return int(d & 0xFFFF); }
constexpr int size_n(ulong d) { return int(d >> 16 & 0xFFFF); }
constexpr int size_k(ulong d) { return int(d >> 32 & 0xFFFFFF) - 1; }

enum class Role { kLeft, kRight, kDestination };

template <class T>
constexpr constant bool is_memory_tensor = false;
template <class T, class Extents, class Kind>
constexpr constant bool is_memory_tensor<metal::tensor<T, Extents, Kind>> = true;
template <class T, int Inner, int Outer>
constexpr constant bool is_memory_tensor<Slice<T, Inner, Outer>> = true;

// A variable's type has its address space, and no template of tensors is known for that.
template <class T>
constexpr constant bool is_plain = metal::is_same_v<T, metal::remove_addrspace_t<T>>;

}  // namespace emu

namespace mpp {
namespace tensor_ops {

template <class T, ulong Descriptor, emu::Role role>
struct cooperative_tensor {
  static_assert(metal::is_floating_point_v<T> && emu::is_plain<T>,
                "cooperative tensors of half, bfloat and float are known");
  using element_type = T;

  ushort get_capacity() const thread;
  bool is_valid_element(ushort) const thread;
  metal::array<int, 2> get_multidimensional_index(ushort) const thread;
  thread T& operator[](ushort) thread;
  const thread T& operator[](ushort) const thread;
  thread T* begin() thread;
  thread T* end() thread;
  const thread T* begin() const thread;
  const thread T* end() const thread;
  template <class Tensor>
  void load(const thread Tensor&) thread;
  template <class Tensor>
  void store(const thread Tensor&) const thread;
};

template <ulong Descriptor, class Scope>
struct matmul2d {
  static_assert(metal::is_same_v<Scope, metal::execution_simdgroup>,
                "matmul2d is known for metal::execution_simdgroup");

  template <class Left, class Right, class Element>
  cooperative_tensor<Left, Descriptor, emu::Role::kLeft>
  get_left_input_cooperative_tensor() const thread;
  template <class Left, class Right, class Element>
  cooperative_tensor<Right, Descriptor, emu::Role::kRight>
  get_right_input_cooperative_tensor() const thread;
  template <class Left, class Right, class Element>
  cooperative_tensor<Element, Descriptor, emu::Role::kDestination>
  get_destination_cooperative_tensor() const thread {
    static_assert(emu::is_plain<Left> && emu::is_plain<Right>,
                  "operand type with an address space, expected "
                  "metal::remove_addrspace_t<decltype(operand)>");
    return {};
  }

  template <class A, class B, class C>
  void run(
      thread cooperative_tensor<A, Descriptor, emu::Role::kLeft>&,
      thread cooperative_tensor<B, Descriptor, emu::Role::kRight>&,
      thread cooperative_tensor<C, Descriptor, emu::Role::kDestination>&) const
      thread {
    constexpr int m = emu::size_m(Descriptor), n = emu::size_n(Descriptor);
    constexpr int k = emu::size_k(Descriptor);
    static_assert((m == 16 || m == 32) && (n == 16 || n == 32) &&
                      (k == 16 || k == 32) && (m == 32 || n == 32 || k == 32),
                  "with two cooperative operands m, n and k are 16 or 32, one of them "
                  "32");
  }
  template <class A, class B, class C>
  metal::enable_if_t<emu::is_memory_tensor<B>> run(
      thread A&, thread B&,
      thread cooperative_tensor<C, Descriptor, emu::Role::kDestination>&) const
      thread;
};

}  // namespace tensor_ops
}  // namespace mpp
