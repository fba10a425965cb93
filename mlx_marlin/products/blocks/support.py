"""Whether the kernels of a decoder block run here."""

import mlx.core as mx

from mlx_marlin.backends import selection
from mlx_marlin.products import eligibility
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES


def has_kernels(x: mx.array) -> bool:
    """Returns whether the back end has kernels, for activations of this dtype."""
    if selection.active().blocks is None or dtype_name(x.dtype) not in DTYPE_BYTES:
        return False
    if x.size == 0 or eligibility.unsupported_device() is not None:
        return False
    return eligibility.not_here(mx.default_device() == mx.Device(mx.cpu)) is None
