"""Blocks and calls whose Metal kernels run here: emulated, seeded, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from mlx_marlin.emulator import modes
from mlx_marlin.emulator.counters import Counters
from mlx_marlin.emulator.metal_kernel import metal_kernel
from mlx_marlin.emulator.modes import Options


@contextmanager
def emulated(
    *, seed: int | None = None, workers: int | None = None, trace: bool | None = None
) -> Iterator[Options]:
    """Runs every custom Metal kernel of MLX on the CPU inside the block.

    `mx.fast.metal_kernel` is ours meanwhile, for whatever code builds its kernels
    there; kernels that it built stay emulated. Not for several threads at once.

    Args:
        seed: Chooses the order in which threadgroups and simdgroups run, 0 at first. A
            correct kernel gives the same result for every seed. None, here and below:
            as around the block.
        workers: Host threads, at first as many as there are processors.
        trace: Whether every access to memory is checked: for races, for reads of what
            was never written, for bounds to the byte. At first it is not.

    Raises:
        ValueError: If there are no workers.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} is not positive")
    outer = modes.options.get()
    inner = Options(
        seed=outer.seed if seed is None else seed,
        workers=outer.workers if workers is None else workers,
        trace=outer.trace if trace is None else trace,
    )
    before = modes.options.set(inner)
    around = mx.fast.metal_kernel
    mx.fast.metal_kernel = cast(Any, metal_kernel)
    try:
        yield inner
    finally:
        mx.fast.metal_kernel = around
        modes.options.reset(before)


def trace(function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Counters]:
    """Calls a function in trace mode.

    Args:
        function: Runs kernels of the emulator, in this thread.
        args: Its arguments.
        keywords: Its keyword arguments.

    Returns:
        What each kernel moved and did, in the order of their launches.

    Raises:
        EmulatorError: If a kernel misbehaves.
    """
    launches: list[Counters] = []
    mode = modes.options.set(replace(modes.options.get(), trace=True))
    before = modes.launches.set(launches)
    try:
        function(*args, **keywords)
    finally:
        modes.launches.reset(before)
        modes.options.reset(mode)
    return launches
