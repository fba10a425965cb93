"""Gradients go through traced blocks."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches

from support.decoder_models import assert_close, tiny, traced
from support.models import LAYOUTS


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
