// Everything that the body gather.cu leans on.

#include "product.cuh"

namespace marlin {

#include "gather.cuh"

}  // namespace marlin
