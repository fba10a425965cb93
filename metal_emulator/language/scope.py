"""`emulated` and `trace`: blocks and calls whose Metal kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from metal_emulator import modes
from metal_emulator.counters import Counters
from metal_emulator.metal_kernel import metal_kernel
from metal_emulator.modes import Options

_NO_GPU = "[metal_kernel] No Metal back-end"
_CREATED_BEFORE = (
    "This kernel was created before emulated(), perhaps when its module was imported: "
    "create it, or import its module, inside the block."
)


@contextmanager
def emulated(
    *,
    seed: int | None = None,
    workers: int | None = None,
    trace: bool | None = None,
    resident: int | None = None,
    time_limit: float | None = None,
    tensor_layout: str | None = None,
    complete: bool | None = None,
) -> Iterator[Options]:
    """Runs every custom Metal kernel of MLX on the CPU inside the block.

    The block replaces `mx.fast.metal_kernel`. Kernels that are created inside the
    block remain emulated after it, and those created before remain MLX's, except in
    tests: pytest's plugin sees to them. The replacement is not thread-safe.

    An option that is None keeps the value of the enclosing block.

    Args:
        seed: Seed of the order in which threadgroups and simdgroups run; default 0. A
            correct kernel gives the same result for every seed.
        workers: Host threads; default: the number of processors.
        trace: Whether to check every memory access for races, reads of unwritten
            memory, and bounds to the byte; default False.
        resident: Threadgroups that one host thread interleaves when they wait for
            atomics; default 1, because Metal guarantees no progress of other
            threadgroups.
        time_limit: Maximum seconds per threadgroup; default 60.
        tensor_layout: Order of the elements of cooperative tensors in the lanes of a
            simdgroup: "m5" (default), "g16", or "scrambled", which is no GPU's.
        complete: Whether an output element that no thread writes is an error in trace
            mode; default False: a warning.

    Raises:
        ValueError: If a number is not positive, `resident` exceeds 256, or there is no
            such layout.
    """
    overrides = {
        "seed": seed,
        "workers": workers,
        "trace": trace,
        "resident": resident,
        "time_limit": time_limit,
        "tensor_layout": tensor_layout,
        "complete": complete,
    }
    changed: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    inner = replace(modes.options.get(), **changed)
    token = modes.options.set(inner)
    outer_kernel = mx.fast.metal_kernel
    mx.fast.metal_kernel = cast(Any, metal_kernel)
    try:
        yield inner
    except RuntimeError as error:
        if _NO_GPU in str(error):
            error.add_note(_CREATED_BEFORE)
        raise
    finally:
        mx.fast.metal_kernel = outer_kernel
        modes.options.reset(token)


def trace(
    function: Callable[..., Any],
    /,
    *args: Any,
    resident: int | None = None,
    **keywords: Any,
) -> list[Counters]:
    """Calls a function in trace mode.

    Args:
        function: A function that runs kernels of the emulator in this thread.
        args: Arguments of the function.
        resident: As for `emulated`; not passed to the function.
        keywords: Keyword arguments of the function.

    Returns:
        The counters of every launch, in order.

    Raises:
        EmulatorError: If a kernel violates a rule of Metal.
    """
    launches: list[Counters] = []
    outer = modes.options.get()
    inner = replace(outer, trace=True, resident=resident or outer.resident)
    options_token = modes.options.set(inner)
    launches_token = modes.launches.set(launches)
    try:
        function(*args, **keywords)
    finally:
        modes.launches.reset(launches_token)
        modes.options.reset(options_token)
    return launches
