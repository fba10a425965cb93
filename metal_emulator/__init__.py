"""An emulator that runs Metal kernels on the CPU: those of MLX, and whole files."""

from metal_emulator.compiling.compiler import unavailable
from metal_emulator.counters import Counters
from metal_emulator.errors import CompileError, EmulatorError, EmulatorWarning
from metal_emulator.language.scope import emulated, trace
from metal_emulator.library import Function, Library, library
from metal_emulator.metal_kernel import MetalKernel, metal_kernel
from metal_emulator.static.check import check, check_text

__all__ = [
    "CompileError",
    "Counters",
    "EmulatorError",
    "EmulatorWarning",
    "Function",
    "Library",
    "MetalKernel",
    "check",
    "check_text",
    "emulated",
    "library",
    "metal_kernel",
    "trace",
    "unavailable",
]
