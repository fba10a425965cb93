"""Decides when stock MLX serves a product on a CUDA device because it is faster."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from mlx_marlin.backends.cuda.cost import (
    OWN_HEAD_NORM_SECONDS,
    OWN_NORM_SECONDS,
    OWN_ROPE_SECONDS,
    decoded_seconds,
    predict,
)
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.search import make
from mlx_marlin.planning.dequantize_plan import (
    LEAST_ROWS,
    DequantizePlan,
    dequantize_plan,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Prediction

MOST_ROWS_OF_MLX = ((100_000_000, 32), (30_000_000, 8), (0, 5))
"""Most rows for which the kernels serve an affine 4-bit weight in MLX's layout, by its
minimal number of elements; for more, stock MLX does (measured, docs/lab)."""
SMALL, LEAST_ROWS_OF_SMALL = 8_000_000, 3
"""Elements of a weight in MLX's layout, and the rows from which on the kernels serve a
smaller one: with fewer rows the host is the limit, and stock MLX is as fast (1024x4096
on an H100, docs/cuda.md)."""
FEW_ROWS = 5
"""Most rows for other formats in MLX's layout, which were not measured; for these stock
MLX takes longer than for 8 rows."""


def handover(problem: Problem, device: CudaDevice) -> str | None:
    """Returns why stock MLX serves a product for speed; None if it does not."""
    for unfused, seconds, reason in _unfused(problem):
        fused_seconds, unfused_seconds = (
            predict(make(product, device, {}), device).seconds
            for product in (problem, unfused)
        )
        if fused_seconds > unfused_seconds + seconds:
            return f"on {device.variant} {reason}"
    if problem.norm is not None or problem.invariant or problem.layout == "marlin":
        return None
    most = most_rows(problem)
    is_small = problem.n * problem.k < SMALL
    if is_small and problem.m < LEAST_ROWS_OF_SMALL:
        return f"{problem.m} rows of so small a weight: stock MLX is as fast"
    if problem.m <= most:
        return None
    return (
        f"{problem.m} rows on {device.variant}: our CUDA kernels serve up to {most} "
        f"with such a weight in the layout {problem.layout!r}"
    )


def _unfused(problem: Problem) -> Iterator[tuple[Problem, float, str]]:
    """Yields the product without its RMSNorm, and without its rotation.

    Each comes with the seconds of MLX's separate kernels for the omitted operation, and
    the reason to return if the two are faster than the fused product.
    """
    if problem.norm is not None:
        reason = "every block of this product would normalize the rows again"
        yield replace(problem, norm=None), OWN_NORM_SECONDS, reason
    epilogue = problem.epilogue
    if epilogue.rotation is not None:
        norms = 0 if epilogue.rotation.norm is None else 2
        # One rope each for q and k; a single row without norms needs only one.
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
    """Returns the most rows for which the kernels serve a weight in MLX's layout."""
    if (problem.mode, problem.bits) != ("affine", 4):
        return FEW_ROWS
    size = problem.n * problem.k
    return next(rows for least, rows in MOST_ROWS_OF_MLX if size >= least)


def dequantized(
    problem: Problem, device: CudaDevice, predicted: Callable[[], Prediction]
) -> DequantizePlan | None:
    """Returns the plan that decodes a packed weight first if that is faster."""
    if problem.layout == "mlx" or problem.batch > 1 or problem.invariant:
        return None
    if problem.m < LEAST_ROWS or problem.norm is not None:
        return None
    if decoded_seconds(problem, device) >= predicted().seconds:
        return None
    return dequantize_plan(problem)
