// Declarations for the bodies wgmma.cu and mma_staged.cu.

#include "product_decls.cuh"

namespace marlin {

#include "warpgroup.cuh"
#include "stages.cuh"
#include "staged.cuh"
#include "wgmma.cuh"
#include "mma_staged.cuh"

}  // namespace marlin
