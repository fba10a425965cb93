"""A pytest plugin with a fixture that runs Metal kernels in the emulator.

pytest loads it automatically when the package is installed.
"""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from metal_emulator.metal_kernel import DeferredKernel


@pytest.fixture
def emulated_metal() -> Iterator[None]:
    """Runs every `mx.fast.metal_kernel` of a test in the emulator's trace mode.

    Kernels that modules create when they are imported are emulated too. A race, an
    access out of bounds, a read of unwritten memory or an output element that no thread
    writes fails the test and is reported with its line. The test is skipped if the
    emulator cannot run.
    """
    if reason := metal_emulator.unavailable():
        pytest.skip(f"no emulator: {reason}")
    with metal_emulator.emulated(trace=True, complete=True):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Defers the kernels that modules create before the fixture is active.

    A call of what `mx.fast.metal_kernel` then returns decides who runs the kernel.
    """
    stock = mx.fast.metal_kernel

    @functools.wraps(stock)
    def deferred(*args: Any, **keywords: Any) -> Any:
        return DeferredKernel(metal_emulator.metal_kernel(*args, **keywords))

    mx.fast.metal_kernel = deferred
