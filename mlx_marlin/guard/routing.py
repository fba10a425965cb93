"""Known answers of the kernels that choose experts and add up their results."""

import mlx.core as mx

from mlx_marlin.backends.experts import launch as experts_launch
from mlx_marlin.guard import reference
from mlx_marlin.guard.reference import Answer
from mlx_marlin.weights.dtypes import dtype_name

ROWS = 5
"""More than one row: MLX passes a single row's few scores in another address space, for
which a kernel is compiled again."""


def fault_of_route(
    dtype: mx.Dtype, experts: int, choices: int, of_all: bool, last: bool
) -> str | None:
    """Returns how the kernel that chooses experts differs from its answer, or None.

    Args:
        dtype: Dtype of the logits.
        experts: Logits of a row.
        choices: Experts of a row.
        of_all: As for `experts_launch.route`.
        last: As for `experts_launch.route`.
    """
    with mx.stream(mx.cpu):
        # Few numbers, so that many logits are equal, and with all their bits.
        drawn = mx.random.randint(-6, 6, (ROWS, experts), key=mx.random.key(0))
        logits = (drawn / 3).astype(dtype)
        mx.eval(logits)
    chosen, scores = experts_launch.route(logits, choices, of_all, last)
    mx.eval(chosen, scores)
    with mx.stream(mx.cpu):
        index = mx.arange(experts)
        order = drawn * experts + (index if last else experts - 1 - index)
        expected = mx.argsort(-order, axis=-1)[:, :choices].astype(mx.uint32)
        if not mx.array_equal(mx.sort(chosen, axis=-1), mx.sort(expected, axis=-1)):
            return "it chose the wrong experts"
        wide = reference.wide(logits)
        of_chosen = mx.take_along_axis(wide, chosen, axis=-1)
        others = wide if of_all else of_chosen
        values = mx.exp(of_chosen) / mx.exp(others).sum(-1, keepdims=True)
    return reference.difference(scores, Answer(values, values * 2.0**-16))


def fault_of_combine(dtype: mx.Dtype, n: int, choices: int) -> str | None:
    """Returns how the kernel that adds results differs from its answer, or None.

    Args:
        dtype: Dtype of the results.
        n: Columns of a result.
        choices: Results of a row.
    """
    faults = (_fault_of_sums(dtype, n, choices, rows) for rows in (1, ROWS))
    return next(filter(None, faults), None)


def _fault_of_sums(dtype: mx.Dtype, n: int, choices: int, rows: int) -> str | None:
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        results = mx.random.normal((rows, choices, 1, n), key=keys[0])
        residual = mx.random.normal((rows, n), key=keys[1]).astype(dtype)
        scores = mx.random.uniform(-1, 1, (rows, choices), key=keys[2])
        results = results.astype(dtype)
        mx.eval(results, residual, scores)
    y = experts_launch.combine(results, scores, residual)
    with mx.stream(mx.cpu):
        terms = reference.wide(results.squeeze(-2)) * reference.wide(scores)[..., None]
        values = reference.wide(residual) + terms.sum(1)
        size = mx.abs(reference.wide(residual)) + mx.abs(terms).sum(1)
        bound = size * 2.0**-18 + reference.rounding(values, dtype_name(dtype))
        answer = Answer(values, bound)
    return reference.difference(y, answer)
