"""Conversion between MLX's dtypes and the names that plans use for them."""

from typing import cast

import mlx.core as mx


def dtype(name: str) -> mx.Dtype:
    """Returns the dtype with a name, such as "float16"."""
    return cast(mx.Dtype, getattr(mx, name))


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns the name of a dtype: "float16" for `mx.float16`."""
    return str(dtype).removeprefix("mlx.core.")


def floating(scales: mx.Dtype, default: mx.Dtype) -> mx.Dtype:
    """Returns the dtype of scales, or a default if scales are integers."""
    return scales if mx.issubdtype(scales, mx.floating) else default


def result_dtype(x: mx.Dtype, scales: mx.Dtype) -> mx.Dtype:
    """Returns the dtype of a product, which does not depend on integer scales."""
    return mx.result_type(x, floating(scales, x))
