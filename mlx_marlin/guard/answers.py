"""Answers of checks: values in float64 with error bounds, and the tolerances."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from mlx_marlin.backends import kernels

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Relative error of rounding to nearest: half a unit in the last place. Truncation has
up to twice that."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Absolute rounding error of subnormal results."""
OF_SUM = {"float16": 2.0**-15, "bfloat16": 2.0**-12, "float32": 2.0**-19}
"""Error of a float32 sum relative to the sum of magnitudes. It allows for the offset
that is added to codes and subtracted again: 64 on Metal, up to 1024 on CUDA, which does
not support float32."""
STEEPEST = 1.2
"""Upper bound of the slope of activations (silu 1.1, gelu 1.13)."""
OF_FUNCTIONS = 2.0**-18
"""Relative error of functions and sums of the epilogue, in float32."""
OF_ANGLES = 2.0**-20
"""Error of sines and cosines, and relative error of angles, in float32."""
OF_COMBINED = 2.0
"""Factor on `OF_SUM` for sums that are combined before they are stored. Weights of
integer codes are rounded to the dtype, so one sum in some thousands exceeds `OF_SUM`; a
sum that is stored directly hides that in its own rounding."""
OF_NORMED_ROWS = 3.0
"""Factor on the error that results from rounding normalized rows. Roundings are
independent, so the error of a sum of k values is their root mean square times the root
of k; a few times that is a safe bound."""


class KernelError(Exception):
    """Building, calling or evaluating a kernel has raised the error that caused it."""


@contextmanager
def running() -> Iterator[None]:
    """Attributes what is raised inside to the kernel, and not to its check."""
    try:
        yield
    except Exception as error:  # of a compiler, a driver or MLX
        raise KernelError from error


def evaluate(*arrays: mx.array) -> None:
    """Evaluates results of kernels and nothing else: what began before has ended."""
    mx.synchronize()
    with running(), kernels.evaluation():
        mx.eval(*arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A known answer: values in float64, and a bound of the error of each."""

    values: mx.array
    bound: mx.array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EpilogueArrays:
    """Operands of an epilogue and of an RMSNorm; None if absent."""

    bias: mx.array | None = None  # [n]
    multiply: mx.array | None = None  # Array of the result's shape
    residual: mx.array | None = None  # Array of the result's shape
    positions: mx.array | None = None  # Positions of rows, int32 [m] or [1]
    freqs: mx.array | None = None  # As in `mx.fast.rope`, float32 [features / 2]
    head_norms: tuple[mx.array, ...] = ()  # RMSNorm weights [features] of q and k
    norm: mx.array | None = None  # RMSNorm weight [k] of the rows of x


def rounding(values: mx.array, dtype: str) -> mx.array:
    """Returns the error bound of rounding values to a dtype."""
    return mx.abs(values) * ROUNDING[dtype] + SMALLEST[dtype]


def wide(array: mx.array) -> mx.array:
    """Returns an array as float64; the default device must be the CPU."""
    return array.astype(mx.float64)


def norm_factor(rows: mx.array, epsilon: float) -> mx.array:
    """Returns the factor of RMSNorm for each row, without the weight."""
    return mx.rsqrt(mx.square(rows).mean(-1, keepdims=True) + epsilon)
