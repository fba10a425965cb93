"""A kernel named "bug" in the emulator's trace mode."""

import pytest

from mlx_marlin.emulator import EmulatorError, emulated
from support.metal_sources import run


def traced(source: str, *inputs: object, **options: object) -> object:
    with emulated(trace=True):
        return run(source, *inputs, name="bug", **options)


def report(source: str, *inputs: object, **options: object) -> str:
    """What trace mode says about a kernel named "bug"."""
    with pytest.raises(EmulatorError) as caught:
        traced(source, *inputs, **options)
    return str(caught.value)
