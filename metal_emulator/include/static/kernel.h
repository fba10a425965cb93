// First line of every unit of the static check: the Metal language in clang's C++ for
// OpenCL, whose address spaces are real. Declarations only; nothing here is ever run.
#pragma once
#include "mlx.h"

// Words of OpenCL that are ordinary names in Metal.
#define global metal_global
#define local metal_local
#define generic metal_generic
#define pipe metal_pipe
#define read_only metal_read_only
#define write_only metal_write_only
#define read_write metal_read_write
#define event_t metal_event_t
#define queue_t metal_queue_t
#define sampler_t metal_sampler_t
#define reserve_id_t metal_reserve_id_t

#define kernel
#define coherent(...)
#define restrict __restrict
