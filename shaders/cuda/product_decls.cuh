// Declarations for the body mma.cu. MLX reads a header's text in every call, so the header only
// includes this file.

#include "prelude.cuh"

namespace marlin {

#include "../lib/work.metal"
#include "../lib/decode.metal"
#include "../lib/words.metal"
#include "../lib/epilogue.metal"
#include "../lib/gate.metal"
#include "split_output.cuh"
#include "instructions.cuh"
#include "lane.cuh"
#include "warp.cuh"
#include "rows.cuh"
#include "paired_epilogue.cuh"
#include "gated.cuh"
#include "rotated.cuh"
#include "weights.cuh"
#include "weight_tile.cuh"
#include "main_loop.cuh"
#include "mma.cuh"

}  // namespace marlin
