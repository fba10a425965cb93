// metal_simdgroup, metal_quadgroup, metal_compute and metal_simdgroup_matrix.
#pragma once
#include "library.h"

namespace metal {

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define EMU_REDUCE(name) \
  template <class T>     \
  T simd_##name(T);      \
  template <class T>     \
  T quad_##name(T);
EMU_REDUCE(sum)
EMU_REDUCE(product)
EMU_REDUCE(max)
EMU_REDUCE(min)
EMU_REDUCE(and)
EMU_REDUCE(or)
EMU_REDUCE(xor)
EMU_REDUCE(prefix_exclusive_sum)
EMU_REDUCE(prefix_inclusive_sum)
EMU_REDUCE(prefix_exclusive_product)
EMU_REDUCE(prefix_inclusive_product)
EMU_REDUCE(broadcast_first)
#undef EMU_REDUCE

#define EMU_SHUFFLE(name)   \
  template <class T>        \
  T simd_##name(T, ushort); \
  template <class T>        \
  T quad_##name(T, ushort);
EMU_SHUFFLE(shuffle)
EMU_SHUFFLE(broadcast)
EMU_SHUFFLE(shuffle_xor)
EMU_SHUFFLE(shuffle_up)
EMU_SHUFFLE(shuffle_down)
EMU_SHUFFLE(shuffle_rotate_up)
EMU_SHUFFLE(shuffle_rotate_down)
#undef EMU_SHUFFLE
#define EMU_FILL(name)  \
  template <class T>    \
  T name(T, T, ushort); \
  template <class T>    \
  T name(T, T, ushort, ushort);
EMU_FILL(simd_shuffle_and_fill_up)
EMU_FILL(simd_shuffle_and_fill_down)
EMU_FILL(quad_shuffle_and_fill_up)
EMU_FILL(quad_shuffle_and_fill_down)
#undef EMU_FILL

class simd_vote {
 public:
  using vote_t = ulong;
  explicit constexpr simd_vote(vote_t = 0) {}
  explicit constexpr operator vote_t() const { return 0; }
  bool any() const;
  bool all() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
bool simd_is_helper_thread();
bool quad_any(bool);
bool quad_all(bool);
bool quad_is_first();
bool quad_is_helper_thread();

class quad_vote {
 public:
  using vote_t = ushort;
  explicit constexpr quad_vote(vote_t = 0) {}
  explicit constexpr operator vote_t() const { return 0; }
  bool any() const;
  bool all() const;
};
quad_vote quad_ballot(bool);
quad_vote quad_active_threads_mask();

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup matrices are half, bfloat or float");

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements();
  const thread vec<T, 2>& thread_elements() const;

 private:
  vec<T, 2> elements_;
};

template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value);

// Deprecated here only: that makes clang tell the operand types of every call.
template <class D, class A, class B, class C>
[[deprecated]] void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&,
                                                  simdgroup_matrix<A, 8, 8>,
                                                  simdgroup_matrix<B, 8, 8>,
                                                  simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                        simdgroup_matrix<B, 8, 8>);
template <class T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8>,
                                    simdgroup_matrix<T, 8, 8>);

#define EMU_SPACE(space)                                                      \
  template <class T>                                                          \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const space T*,      \
                      ulong elements_per_row = 8, ulong2 origin = ulong2(0),  \
                      bool transpose_matrix = false);                         \
  template <class T>                                                          \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*,                   \
                       ulong elements_per_row = 8, ulong2 origin = ulong2(0), \
                       bool transpose_matrix = false);
EMU_SPACE(device)
EMU_SPACE(threadgroup)
#undef EMU_SPACE

}  // namespace metal
