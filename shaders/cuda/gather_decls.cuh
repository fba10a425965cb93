// Declarations for the body gather.cu.

#include "product_decls.cuh"

namespace marlin {

#include "gather.cuh"

}  // namespace marlin
