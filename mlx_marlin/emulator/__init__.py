"""An emulator that runs `mx.fast.metal_kernel` calls on the CPU."""

from mlx_marlin.emulator.compiling.compiler import unavailable
from mlx_marlin.emulator.counters import Counters
from mlx_marlin.emulator.errors import CompileError, EmulatorError, EmulatorWarning
from mlx_marlin.emulator.language.scope import emulated, trace
from mlx_marlin.emulator.metal_kernel import MetalKernel, metal_kernel
from mlx_marlin.emulator.static.check import check, check_text

__all__ = [
    "CompileError",
    "Counters",
    "EmulatorError",
    "EmulatorWarning",
    "MetalKernel",
    "check",
    "check_text",
    "emulated",
    "metal_kernel",
    "trace",
    "unavailable",
]
