"""Fits parameters whose logarithms move the logarithms of times."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Errors = Callable[[Vector], Vector]
"""The logarithmic errors of all rows at some logarithms of parameters."""

STEP = 1e-4
"""Relative step of the numerical derivatives."""
ITERATIONS = 60
OUTLIER = 0.1
"""Logarithmic error from which a row counts less."""
CONVERGED = 1e-9
NOISE, PRIOR = 0.01, 0.5
"""Standard deviations that are expected of the logarithms of times and of constants.
The second keeps constants that a file does not determine where they are."""
RIDGE = (NOISE / PRIOR) ** 2


def fitted(
    errors: Errors, starts: list[Vector], usual: Vector
) -> tuple[Vector, Vector]:
    """Returns the best logarithms of parameters, and their standard errors.

    Args:
        errors: The errors.
        starts: Where to start; the best of the minima found counts.
        usual: Where parameters stay that no row determines.
    """
    minima = [_least(errors, start, usual) for start in starts]
    best = min(minima, key=lambda found: _loss(errors(found), found - usual))
    slopes = _slopes(errors, best)
    variance = max(float(np.mean(errors(best) ** 2)), NOISE**2)
    square = slopes.T @ slopes / variance + np.eye(len(best)) / PRIOR**2
    return best, np.sqrt(np.diag(np.linalg.inv(square)))


def _least(errors: Errors, start: Vector, usual: Vector) -> Vector:
    """Returns a local minimum of the loss (Levenberg-Marquardt, reweighted).

    Args:
        errors: The errors of all rows at some logarithms of parameters.
        start: Where to start.
        usual: What parameters that no row determines should be.
    """
    at, damping = start, 1e-2
    loss = _loss(errors(at), at - usual)
    for _ in range(ITERATIONS):
        found, slopes = errors(at), _slopes(errors, at)
        weights = _weights(found)[:, None]
        square = slopes.T @ (weights * slopes) + RIDGE * np.eye(len(at))
        gradient = slopes.T @ (weights[:, 0] * found) + RIDGE * (at - usual)
        scale = np.diag(np.diag(square) + 1e-9)
        step = np.linalg.solve(square + damping * scale, -gradient)
        candidate = at + np.clip(step, -0.5, 0.5)
        better = _loss(errors(candidate), candidate - usual)
        if better < loss:
            gain, at, loss = loss - better, candidate, better
            damping /= 5
            if gain < CONVERGED * loss:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5
    return at


def _slopes(errors: Errors, at: Vector) -> Vector:
    steps = STEP * np.eye(len(at))
    columns = [(errors(at + step) - errors(at - step)) / (2 * STEP) for step in steps]
    return np.stack(columns, axis=1)


def _weights(errors: Vector) -> Vector:
    return np.minimum(1, OUTLIER / np.maximum(np.abs(errors), 1e-12))


def _loss(errors: Vector, change: Vector) -> float:
    """Returns Huber's loss of errors, and the price of a change of the parameters."""
    size = np.abs(errors)
    large = OUTLIER * (2 * size - OUTLIER)
    loss = np.where(size <= OUTLIER, size**2, large).sum()
    return float(loss + RIDGE * (change**2).sum())
