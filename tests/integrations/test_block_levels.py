"""Levels of a block's graph, and gradients through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches

import mlx_marlin
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.products.exporting import exporting
from support.decoder_models import assert_close, one_stream, tiny, traced
from support.metal_encoder import Encoding, encoding_of
from support.models import LAYOUTS
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


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_gradients_go_through_experts_that_are_traced(family: str) -> None:
    own, wide = tiny(family), tiny(family)
    model = traced(tiny(family), layout="marlin")
    own.set_dtype(mx.float16)
    model.set_dtype(mx.float16)
    x = mx.random.normal((1, 1, 128), key=mx.random.key(8)).astype(mx.float16)

    def gradient(of: nn.Module, x: mx.array) -> mx.array:
        def total(x: mx.array) -> mx.array:
            return (of.layers[0](x, None, caches.KVCache()) ** 2).sum()

        return mx.grad(total)(x).astype(mx.float32)

    expected = gradient(wide, x.astype(mx.float32))
    error, theirs = (
        mx.linalg.norm(gradient(each, x) - expected) for each in (model, own)
    )
    assert error < 2 * theirs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "dots1", "qwen3_next"])
@pytest.mark.usefixtures("stock")
def test_gradients_go_through_a_traced_block(family: str, layout: str) -> None:
    def gradient(model: nn.Module) -> mx.array:
        def loss(x: mx.array) -> mx.array:
            cache = caches.KVCache()
            model.layers[1](x[:, :2], None, cache)
            y: mx.array = model.layers[1](x[:, 2:], None, cache)
            return (y**2).mean()

        return mx.grad(loss)(mx.random.normal((1, 3, 128), key=mx.random.key(0)))

    expected = gradient(tiny(family))

    found = gradient(traced(tiny(family), layout=layout, join=True))

    assert mx.abs(expected).min() > 0
    assert_close([found], [expected], 1e-5)


@pytest.mark.usefixtures("cuda")
def test_gradients_do_not_lack_what_a_trace_left_out(tmp_path: Path) -> None:
    model, own = (tiny("llama", mx.float16) for _ in range(2))
    traced(model, layout="marlin", join=True)
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0)).astype(mx.float16)

    def gradient(block: nn.Module) -> mx.array:
        def loss(x: mx.array) -> mx.array:
            y: mx.array = block(x, None, caches.KVCache())
            return (y.astype(mx.float32) ** 2).mean()

        return mx.grad(loss)(x)

    block = model.layers[0]
    y = block(x, None, caches.KVCache())
    mx.export_to_dot(str(tmp_path / "graph"), y)
    graph = (tmp_path / "graph").read_text()
    assert "Matmul" in graph
    assert "CustomTransforms" not in graph

    assert_close([gradient(block)], [gradient(own.layers[0])], 2e-3)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transform", [mx.vjp, mx.jvp])
def test_derivatives_go_through_a_batchs_attention(transform: Any) -> None:
    model, own = (tiny("llama", mx.float16) for _ in range(2))
    traced(model, layout="marlin", join=True)
    x = mx.random.normal((2, 5, 128), key=mx.random.key(0)).astype(mx.float16)

    def results(block: nn.Module) -> list[mx.array]:
        def decoded(x: mx.array) -> mx.array:
            cache = caches.BatchKVCache([0, 2])
            block(x[:, :4], cache.make_mask(4), cache)
            y: mx.array = block(x[:, 4:], cache.make_mask(1), cache)
            return y

        towards = mx.ones_like(x if transform is mx.jvp else decoded(x))
        found: list[list[mx.array]] = transform(decoded, [x], [towards])
        return [*found[0], *found[1]]

    block = model.layers[0]
    assert_close(results(block), results(own.layers[0]), 1e-3)
