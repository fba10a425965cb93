// Metal 4's tensor operations, as far as a single simdgroup's matmul2d.
#pragma once
#include "../matmul2d.h"
