"""Errors of a result compared with float64."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of a result."""

    relative: float  # Frobenius norm of the error, relative to that of the exact result
    nmse: float  # Its square: the mean square error, normalized
    max_error: float  # The largest absolute error of an element
    rms_error: float  # The root of the mean square error

    @classmethod
    def of(cls, actual: Floats, exact: Floats) -> Self:
        """Compares a result with the exact one; all errors are NaN if one element is.

        The relative error of an exact result of zeros is 0 or infinite.
        """
        error = np.abs(actual - exact)
        norm, size = np.linalg.norm(error), np.linalg.norm(exact)
        relative = float(norm / size) if size else float(np.inf if norm else norm)
        return cls(
            relative=relative,
            nmse=relative**2,
            max_error=float(error.max()),
            rms_error=float(norm / np.sqrt(error.size)),
        )
