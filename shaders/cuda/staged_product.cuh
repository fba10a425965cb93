// Everything that the bodies wgmma.cu, mma_staged.cu and their fused ones lean on.

#include "product.cuh"

namespace marlin {

#include "warpgroup.cuh"
#include "stages.cuh"
#include "staged.cuh"
#include "wgmma.cuh"
#include "mma_staged.cuh"

}  // namespace marlin
