// Declarations for the body dequantize.cu.

#include "prelude.cuh"

namespace marlin {

#include "../lib/work.metal"
#include "../lib/decode.metal"
#include "../lib/words.metal"
#include "../lib/epilogue.metal"
#include "instructions.cuh"
#include "lane.cuh"
#include "weights.cuh"
#include "weight_tile.cuh"
#include "decode.cuh"

}  // namespace marlin
