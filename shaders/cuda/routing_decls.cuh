// Declarations for the bodies route.cu and combine.cu.

#include "prelude.cuh"

namespace marlin {

#include "warp.cuh"

#define simd_max max_of_warp
#define simd_min min_of_warp
#define simd_sum sum_of_warp
#include "../lib/routing.metal"

}  // namespace marlin
