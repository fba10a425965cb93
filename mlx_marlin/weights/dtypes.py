"""Dtypes of MLX, and the names that plans know them by."""

from typing import cast

import mlx.core as mx


def dtype(name: str) -> mx.Dtype:
    """Returns the dtype of a name."""
    return cast(mx.Dtype, getattr(mx, name))


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns "float16" for `mx.float16`: the name that plans know a dtype by."""
    return str(dtype).removeprefix("mlx.core.")
