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
    *,
    seed: int | None = None,
    workers: int | None = None,
    trace: bool | None = None,
    resident: int | None = None,
    time_limit: float | None = None,
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
        resident: Threadgroups of a host thread that take turns when one waits for an
            atomic, at first 1: Metal promises no progress of any other.
        time_limit: Seconds that a threadgroup may take, 60 at first.

    Raises:
        ValueError: If a number is not positive, or `resident` exceeds 256.
    """
    overrides = {
        "seed": seed,
        "workers": workers,
        "trace": trace,
        "resident": resident,
        "time_limit": time_limit,
    }
    given: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    inner = replace(modes.options.get(), **given)
    before = modes.options.set(inner)
    around = mx.fast.metal_kernel
    mx.fast.metal_kernel = cast(Any, metal_kernel)
    try:
        yield inner
    finally:
        mx.fast.metal_kernel = around
        modes.options.reset(before)


def trace(
    function: Callable[..., Any],
    /,
    *args: Any,
    resident: int | None = None,
    **keywords: Any,
) -> list[Counters]:
    """Calls a function in trace mode.

    Args:
        function: Runs kernels of the emulator, in this thread.
        args: Its arguments.
        resident: As for `emulated`; not handed to the function.
        keywords: Its keyword arguments.

    Returns:
        What each kernel moved and did, in the order of their launches.

    Raises:
        EmulatorError: If a kernel misbehaves.
    """
    launches: list[Counters] = []
    outer = modes.options.get()
    inner = replace(outer, trace=True, resident=resident or outer.resident)
    mode = modes.options.set(inner)
    before = modes.launches.set(launches)
    try:
        function(*args, **keywords)
    finally:
        modes.launches.reset(before)
        modes.options.reset(mode)
    return launches
