"""An emulator that runs `mx.fast.metal_kernel` calls on the CPU."""

from metal_emulator.compiling.compiler import unavailable
from metal_emulator.counters import Counters
from metal_emulator.errors import CompileError, EmulatorError, EmulatorWarning
from metal_emulator.language.scope import emulated, trace
from metal_emulator.metal_kernel import MetalKernel, metal_kernel
from metal_emulator.static.check import check, check_text

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
