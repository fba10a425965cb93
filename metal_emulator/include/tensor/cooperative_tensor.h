// A matrix operand that is spread over the lanes of a simdgroup.
#pragma once
#include "descriptor.h"

namespace emu::tensor {

// A NaN that no arithmetic makes: what an element holds until the kernel sets it.
template <class T>
constexpr auto kNeverSet =
    static_cast<unsigned short>(metal::is_same_v<T, half> ? 0xFEED : 0xFFED);
template <>
inline constexpr uint kNeverSet<float> = 0xFFEDFACE;

template <Descriptor d, Role role>
constexpr Sentence beyond_of() {
  Sentence text;
  text << name<d>.text << ": a lane holds " << int(shape_of(d, role).capacity())
       << " elements of the " << role_name(role) << ", the kernel uses element";
  return text;
}
template <Descriptor d, Role role>
constexpr Sentence unset_of() {
  Sentence text;
  text << name<d>.text << " reads the " << role_name(role)
       << ", of which the kernel has never set element";
  return text;
}

template <Descriptor d, Role role>
struct Complaints {
  static constexpr Sentence beyond_text = beyond_of<d, role>();
  static constexpr Sentence unset_text = unset_of<d, role>();
  static constexpr Operation beyond{beyond_text.text, false, Operations::kSimd};
  static constexpr Operation unset{unset_text.text, false, Operations::kSimd};
};

template <class T, Descriptor d, Role role>
class CooperativeTensor {
  static_assert(metal::is_floating_point_v<T>,
                "cooperative tensors of half, bfloat and float are emulated");
  static constexpr bool is_size(int size) { return size > 0 && size % 16 == 0; }
  static_assert(is_size(d.m) && is_size(d.n) &&
                    (role == Role::kDestination || is_size(d.k)),
                "m, n and k of cooperative operands are multiples of 16");

 public:
  using element_type = T;
  using value_type = T;
  static constexpr Descriptor descriptor = d;
  static constexpr Role kRole = role;
  static constexpr Shape kShape = shape_of(d, role);
  static constexpr u32 kCapacity = kShape.capacity();

  METAL_FUNC CooperativeTensor() {
    for (u32 i = 0; i < kCapacity; ++i)
      __builtin_memcpy(&elements_[i], &kNeverSet<T>, sizeof(T));
  }

  // Not constexpr in Metal either.
  METAL_FUNC ushort get_capacity() const { return kCapacity; }
  METAL_FUNC static constexpr ushort get_rank() { return 2; }
  METAL_FUNC bool is_valid_element(uint i) const { return i < kCapacity; }

  METAL_FUNC T& operator[](uint i) {
    if (i >= kCapacity) EMU_REFUSE((Complaints<d, role>::beyond), i);
    return elements_[i];
  }
  METAL_FUNC const T& operator[](uint i) const {
    if (i >= kCapacity) EMU_REFUSE((Complaints<d, role>::beyond), i);
    return elements_[i];
  }
  // Column and row of this lane's element in the matrix as it is stored.
  METAL_FUNC metal::array<int, 2> get_multidimensional_index(uint i) const {
    if (i >= kCapacity) EMU_REFUSE((Complaints<d, role>::beyond), i);
    Place at = place(kShape, self().lane(), i);
    return {{int(at.column), int(at.row)}};
  }

  METAL_FUNC T* begin() { return elements_; }
  METAL_FUNC T* end() { return elements_ + kCapacity; }
  METAL_FUNC const T* begin() const { return elements_; }
  METAL_FUNC const T* end() const { return elements_ + kCapacity; }

  // From and to memory. Every lane accesses its own elements.
  template <class Tensor>
  METAL_FUNC metal::enable_if_t<is_view<Tensor>> load(const Tensor& source) {
    static constexpr Operation operation{"cooperative_tensor::load", true,
                                         Operations::kMatrixMemory};
    mslemu_arrive(&operation);
    copy_from(source);
  }
  template <class Tensor>
  METAL_FUNC metal::enable_if_t<is_view<Tensor>> store(const Tensor& target) const {
    static constexpr Operation operation{"cooperative_tensor::store", true,
                                         Operations::kMatrixMemory};
    mslemu_arrive(&operation);
    for (u32 i = 0; i < kCapacity; ++i) {
      Place at = place(kShape, self().lane(), i);
      target.write(int(at.column), int(at.row), elements_[i]);
    }
  }
  template <class U>
  METAL_FUNC void copy_from(const View<U>& source) {
    for (u32 i = 0; i < kCapacity; ++i) {
      Place at = place(kShape, self().lane(), i);
      elements_[i] = scalar<T>(source.read(int(at.column), int(at.row)));
    }
  }

 private:
  alignas(16) T elements_[kCapacity];
};

template <class T>
constexpr bool is_cooperative = false;
template <class T, Descriptor d, Role role>
constexpr bool is_cooperative<CooperativeTensor<T, d, role>> = true;

// The first element that was never set, or the capacity. Not inlined: a kernel
// multiplies in many places.
template <class T, u32 Capacity>
inline __attribute__((noinline, no_sanitize("thread"))) u32
find_unset(const T* elements) {
  using Bits = bare<decltype(kNeverSet<T>)>;
  for (u32 i = 0; i < Capacity; ++i) {
    Bits bits;
    __builtin_memcpy(&bits, &elements[i], sizeof bits);
    if (bits == kNeverSet<T>) return i;
  }
  return Capacity;
}

// Ends the threadgroup unless every element was set.
template <class T, Descriptor d, Role role>
METAL_FUNC void require_set(const CooperativeTensor<T, d, role>& tensor) {
  constexpr u32 capacity = shape_of(d, role).capacity();
  u32 found = find_unset<T, capacity>(tensor.begin());
  if (found != capacity) EMU_REFUSE((Complaints<d, role>::unset), found);
}

}  // namespace emu::tensor
