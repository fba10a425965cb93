"""Dispatches and dependent levels of a decoder block on Metal, from exported graphs.

Where MLX has no GPU it exports norms, rope and attention as elementary operations. Here
each is one opaque operation, as on Metal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.products.exporting import exporting
from support.decoder_models import one_stream, tiny
from support.metal_encoder import Encoding, encoding_of
from support.profiles import sampled

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}


def encoding_of_block(model: nn.Module) -> Encoding:
    """Returns how MLX encodes the first block of a model for one new token."""
    cache = one_stream(model)
    model(mx.zeros((1, 3), mx.int32), cache=cache)
    mx.eval([own.state for own in cache])
    block: Any = model.layers[0]
    x = mx.zeros((1, 1, model.args.hidden_size), mx.float16)
    with exporting("M4 Max"), operations_of_metal():
        return encoding_of(lambda x: block(x, None, cache[0]), x)


@contextmanager
def operations_of_metal() -> Iterator[None]:
    """Makes each of MLX's fast operations one operation of an exported graph."""

    def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return _opaque("rms_norm", [x, weight], x)

    def rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return _opaque("rope", [x], x)

    def attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return _opaque("attention", [q, k, v], q)

    own = {"rms_norm": rms_norm, "rope": rope}
    with patch.multiple(mx.fast, scaled_dot_product_attention=attention, **own):
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


@pytest.mark.parametrize(
    ("family", "counts"),
    [("llama", (17, 12)), ("qwen3", (19, 13)), ("qwen3_moe", (32, 21))],
)
def test_levels_of_a_block_of_mlx_lm(family: str, counts: tuple[int, int]) -> None:
    assert encoding_of_block(tiny(family, mx.float16, **SIZES)).counts == counts


@sampled(1, 5)
@pytest.mark.parametrize(
    ("family", "fuse", "counts"),
    [
        ("llama", (), (13, 12)),
        ("llama", ("residual",), (11, 10)),
        ("llama", ("residual", "gate"), (10, 9)),
        ("llama", ("residual", "gate", "norm"), (8, 7)),
        ("qwen3", (), (16, 14)),
        ("qwen3", ("residual",), (14, 12)),
        ("llama", ("residual", "rope"), (11, 10)),
        ("qwen3", ("residual", "rope"), (11, 10)),
        ("llama", ("rope", "add_norm"), (12, 11)),
        ("qwen3", ("rope", "add_norm"), (12, 11)),
        ("qwen3_moe", (), (25, 19)),
        ("qwen3_moe", ("residual", "rope"), (21, 16)),
        ("qwen3_moe", ("residual", "rope", "experts"), (13, 12)),
        ("llama", (*FUSIONS,), (8, 7)),
        ("qwen3", (*FUSIONS,), (8, 7)),
        ("qwen3_moe", (*FUSIONS,), (12, 11)),
    ],
)
def test_levels_of_a_traced_block(
    family: str, fuse: tuple[str, ...], counts: tuple[int, int]
) -> None:
    model = tiny(family, mx.float16, **SIZES)
    mlx_marlin.optimize(model, layout="marlin", join=True, trace=True, fuse=fuse)
    assert encoding_of_block(model).counts == counts


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda x: x.T.reshape(-1) + 1, (2, 2)),  # a copy
        (lambda x: x.reshape(2, 2, 8)[:, 1].sum(), (1, 1)),
        (lambda x: x[:1].T.reshape(-1) + 1, (1, 1)),
        (lambda x: mx.broadcast_to(x[:, None], (4, 3, 8)).reshape(12, 8) + 1, (2, 2)),
        (lambda x: [mx.sin(x), mx.cos(x)], (2, 1)),
        (lambda x: mx.sin(mx.cos(x)) + mx.exp(x), (4, 3)),
    ],
)
def test_views_and_barriers(
    function: Callable[[mx.array], Any], counts: tuple[int, int]
) -> None:
    assert encoding_of(function, mx.zeros((4, 8))).counts == counts


def test_a_wide_graph_goes_down_before_it_is_finished() -> None:
    def independent(x: mx.array) -> list[mx.array]:
        return [mx.sin(x + i) for i in range(30)]

    levels = encoding_of(independent, mx.zeros(8)).levels
    assert levels == (("Add",) * 10, ("Sin",) * 10 + ("Add",) * 20, ("Sin",) * 20)
