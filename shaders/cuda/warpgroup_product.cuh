// Everything that the bodies wgmma.cu and wgmma_fused.cu lean on.

#include "product.cuh"

namespace marlin {

#include "warpgroup.cuh"
#include "stages.cuh"
#include "wgmma.cuh"

}  // namespace marlin
