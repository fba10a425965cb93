"""Tests in the emulator's trace mode, and a kernel named "bug" there."""

import pytest

from metal_emulator import EmulatorError, emulated
from mlx_marlin.backends import selection
from support.metal_sources import run

emulator_only = pytest.mark.skipif(
    selection.backend() != "emulator",
    reason="only the emulator traces, counts and orders",
)
"""For tests that look for races and stray accesses, or read counters. On a GPU nothing
is traced, and a kernel that was first built in trace mode would stay emulated."""
needs_kernels = pytest.mark.skipif(
    selection.backend() == "stock", reason="nothing here runs Metal kernels"
)


def traced(source: str, *inputs: object, **options: object) -> object:
    with emulated(trace=True):
        return run(source, *inputs, name="bug", **options)


def report(source: str, *inputs: object, **options: object) -> str:
    """What trace mode says about a kernel named "bug"."""
    with pytest.raises(EmulatorError) as caught:
        traced(source, *inputs, **options)
    return str(caught.value)
