"""When stock MLX should serve a product on a CUDA device, and why."""

from collections.abc import Iterator
from dataclasses import replace

from mlx_marlin.backends.cuda.cost import (
    OWN_HEAD_NORM_SECONDS,
    OWN_NORM_SECONDS,
    OWN_ROPE_SECONDS,
)
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.search import make, predict
from mlx_marlin.planning.dense_plan import DensePlan, dense_plan
from mlx_marlin.planning.problem import Problem

MOST_ROWS = 128
"""Rows up to which our kernels serve a packed weight; beyond, a plain product does, of
the weight decoded once."""
MOST_ROWS_OF_MLX = ((100_000_000, 32), (30_000_000, 8), (0, 5))
"""Rows up to which they serve one in MLX's layout, affine 4-bit, by its least size;
beyond, stock MLX does (measured, docs/lab)."""
FEW_ROWS = 5
"""The same in other formats of that layout, which have not been timed: for so few rows
stock MLX takes longer than for 8."""


def handover(problem: Problem, device: CudaDevice) -> str | None:
    """Says why stock MLX should serve a product for speed; None if ours should."""
    for apart, seconds, reason in _apart(problem):
        both = (predict(make(each, device, {}), device) for each in (problem, apart))
        inside, own = (each.seconds for each in both)
        if inside > own + seconds:
            return f"on {device.variant} {reason}"
    if problem.norm is not None:
        return None
    most = most_rows(problem)
    if problem.invariant or problem.m <= most or dense(problem) is not None:
        return None
    return (
        f"{problem.m} rows on {device.variant}: our CUDA kernels serve up to {most} "
        f"with such a weight in the layout {problem.layout!r}"
    )


def _apart(problem: Problem) -> Iterator[tuple[Problem, float, str]]:
    """Yields a product without its norm, and one without its rotation.

    With each come the seconds that MLX's own kernels for it take, and what to say if
    both together are faster.
    """
    if problem.norm is not None:
        reason = "every block of this product would normalize the rows again"
        yield replace(problem, norm=None), OWN_NORM_SECONDS, reason
    epilogue = problem.epilogue
    if epilogue.rotation is not None:
        norms = 0 if epilogue.rotation.norm is None else 2
        # Of q and k, which one row without norms has in one array.
        ropes = 2 if problem.m > 1 or norms else 1
        seconds = ropes * OWN_ROPE_SECONDS + norms * OWN_HEAD_NORM_SECONDS
        own = "norms and ropes take" if norms else "a rope takes"
        reason = f"to rotate heads costs this product more time than {own}"
        yield (
            replace(problem, epilogue=replace(epilogue, rotation=None)),
            seconds,
            reason,
        )


def most_rows(problem: Problem) -> int:
    """Returns the rows up to which our kernels serve a product's weight for speed."""
    if problem.layout == "marlin":
        return MOST_ROWS
    if (problem.mode, problem.bits) != ("affine", 4):
        return FEW_ROWS
    size = problem.n * problem.k
    return next(rows for least, rows in MOST_ROWS_OF_MLX if size >= least)


def dense(problem: Problem) -> DensePlan | None:
    """Returns the plain product of a weight decoded once, where that is faster."""
    if problem.layout == "mlx" or problem.batch > 1 or problem.invariant:
        return None
    return dense_plan(problem) if problem.m > MOST_ROWS else None
