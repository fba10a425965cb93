"""Decoder blocks as graphs of Metal operations, on a machine without Metal.

Where MLX has no GPU it exports norms, rope and attention as elementary operations. Here
each is one opaque operation, as on Metal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.products.exporting import exporting
from support.decoder_models import one_stream
from support.metal_encoder import Encoding, encoding_of

DEVICE = "M4 Max"


def encoding_of_block(model: nn.Module) -> Encoding:
    """Returns how MLX encodes the first block of a model for one new token.

    Args:
        model: A model of mlx-lm, optimized or not.
    """
    cache = one_stream(model)
    model(mx.zeros((1, 3), mx.int32), cache=cache)
    mx.eval([own.state for own in cache])
    block: Any = model.layers[0]
    x = mx.zeros((1, 1, model.args.hidden_size), mx.float16)
    with exporting(DEVICE), operations_of_metal():
        return encoding_of(lambda x: block(x, None, cache[0]), x)


@contextmanager
def operations_of_metal() -> Iterator[None]:
    """Makes each of MLX's fast operations one operation of an exported graph."""
    with ExitStack() as stack:

        def replace(owner: object, name: str, function: Callable[..., Any]) -> None:
            stack.enter_context(patch.object(owner, name, function))

        replace(mx.fast, "rms_norm", _rms_norm)
        replace(mx.fast, "rope", _rope)
        replace(mx.fast, "scaled_dot_product_attention", _attention)
        yield


def _opaque(name: str, inputs: Sequence[mx.array], like: mx.array) -> mx.array:
    """Returns the result of an operation that reads inputs of any strides."""
    names = [f"input{index}" for index in range(len(inputs))]
    kernel: Any = mx.fast.metal_kernel(
        name=name,
        input_names=names,
        output_names=["out"],
        source="",
        ensure_row_contiguous=False,
    )
    (result,) = kernel(
        inputs=list(inputs),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[like.shape],
        output_dtypes=[like.dtype],
    )
    return result  # type: ignore[no-any-return]


def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return _opaque("rms_norm", [x, weight], x)


def _rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return _opaque("rope", [x], x)


def _attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    return _opaque("attention", [q, k, v], q)
