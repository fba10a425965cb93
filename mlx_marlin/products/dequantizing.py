"""Plain weights from packed ones."""

import mlx.core as mx

from mlx_marlin.products.reference.weight import plain
from mlx_marlin.weights.dtypes import dtype_name, floating
from mlx_marlin.weights.formats import DTYPE_BYTES
from mlx_marlin.weights.packed_weight import PackedWeight


def dequantize(packed: PackedWeight, dtype: mx.Dtype | None = None) -> mx.array:
    """Returns the plain weight that a packed one stands for.

    Codes are scaled in float32 and rounded to `dtype` once.

    Args:
        packed: The weight [..., n, k].
        dtype: Dtype of the result. Default: that of the scales; bfloat16 where the
            scales are integers, as in MLX.

    Returns:
        The weight [..., n, k].

    Raises:
        TypeError: If `packed` is not a `PackedWeight`, or `dtype` not a dtype of MLX.
        ValueError: If `dtype` is not float16, bfloat16 or float32.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"packed must be a PackedWeight, got {type(packed).__name__}")
    if dtype is None:
        dtype = floating(packed.dtype, mx.bfloat16)
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"dtype must be an mx.Dtype, got {type(dtype).__name__}")
    if dtype_name(dtype) not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype_name(dtype)}, expected one of {[*DTYPE_BYTES]}")
    return plain(packed, dtype)
