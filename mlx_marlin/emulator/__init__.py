"""Runs any `mx.fast.metal_kernel` call on the CPU."""

from mlx_marlin.emulator.build import unavailable
from mlx_marlin.emulator.errors import CompileError, EmulatorError
from mlx_marlin.emulator.metal_kernel import MetalKernel, emulated, metal_kernel

__all__ = [
    "CompileError",
    "EmulatorError",
    "MetalKernel",
    "emulated",
    "metal_kernel",
    "unavailable",
]
