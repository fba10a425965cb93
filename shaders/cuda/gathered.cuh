// Declarations for the body gather.cu.

#include "product.cuh"

namespace marlin {

#include "gather.cuh"

}  // namespace marlin
