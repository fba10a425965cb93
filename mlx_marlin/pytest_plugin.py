"""A pytest fixture that puts Metal kernels under test where there is no Metal.

Installed with the package; pytest finds it by itself.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture
def emulated_metal() -> Iterator[None]:
    """Runs every `mx.fast.metal_kernel` that a test builds in the emulator, traced.

    A race, an access out of bounds or a value that was never written fails the test,
    with the line. Output elements that no thread writes are an `EmulatorWarning`. Skips
    where the emulator cannot run.
    """
    # Here, because pytest imports this file in every project of the environment.
    from mlx_marlin import emulator

    if reason := emulator.unavailable():
        pytest.skip(f"no emulator: {reason}")
    with emulator.emulated(trace=True):
        yield
