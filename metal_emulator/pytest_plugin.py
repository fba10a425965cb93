"""A pytest plugin with a fixture that runs Metal kernels in the emulator.

pytest loads it automatically when the package is installed.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture
def emulated_metal() -> Iterator[None]:
    """Runs every `mx.fast.metal_kernel` of a test in the emulator's trace mode.

    A race, an access out of bounds or a read of unwritten memory fails the test and is
    reported with its line. Output elements that no thread writes give an
    `EmulatorWarning`. The test is skipped if the emulator cannot run.
    """
    # Imported here, because pytest loads this module in every project.
    import metal_emulator

    if reason := metal_emulator.unavailable():
        pytest.skip(f"no emulator: {reason}")
    with metal_emulator.emulated(trace=True):
        yield
