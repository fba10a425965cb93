// Metal 4's tensor operations for the static check.
#pragma once
#include "../matmul2d.h"
