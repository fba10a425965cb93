"""Traced blocks compute rope as mlx-lm does, fused into a product if supported."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models import rope_utils

import mlx_marlin
from mlx_marlin.planning.epilogue import Rotation
from mlx_marlin.planning.plan import Plan
from support.decoder_models import (
    WIDE_HEADS,
    Caches,
    assert_close,
    assert_equal,
    decoded,
    graphs,
    many_streams,
    one_stream,
    tiny,
    traced,
    with_left_padding,
)
from support.profiles import sampled

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
PACKED: dict[str, Any] = {"layout": "marlin", "join": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@sampled(4)
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    ("family", "options", "rotates"),
    [
        ("llama", {}, True),
        ("llama", {"rope_scaling": LLAMA3}, True),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, True),
        ("llama", {"rope_scaling": YARN}, True),
        ("gpt_oss", {"rope_scaling": YARN}, True),
        ("qwen2", {}, True),
        ("llama", {"rope_traditional": True}, False),
        ("qwen3", {}, True),  # q and k have norms before
        ("exaone4", {}, True),
        ("olmo2", {}, False),  # of all heads together
        ("gemma3_text", {}, False),  # of its own class
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [one_stream, with_left_padding, many_streams])
def test_a_product_rotates_heads_of_64_features(
    cuda: list[Plan],
    make: Callable[[nn.Module], Caches],
    family: str,
    options: dict[str, Any],
    rotates: bool,
) -> None:
    given = {**WIDE_HEADS, **options}
    own = mlx_marlin.optimize(tiny(family, mx.float16, **given), **PACKED, trace=False)
    expected = decoded(own, make)
    assert not any(plan.problem.epilogue.rotation for plan in cuda)

    outputs = decoded(traced(tiny(family, mx.float16, **given), **PACKED), make)

    # Norms after the products stretch what is rounded: to float32 both have 3e-3.
    assert_close(outputs, expected, 4e-3 if family == "exaone4" else 2e-3)
    found = {plan.problem.epilogue.rotation for plan in cuda} - {None}
    rotation = Rotation(64, 384, per_row=make is with_left_padding)
    if options.get("rope_scaling") is YARN:
        rotation = replace(rotation, factor=0.1 * math.log(32) + 1)
    if family in ("qwen3", "exaone4"):
        rotation = replace(rotation, norm=1e-5, queries=256)
    assert found == ({rotation} if rotates else set())


class TwoStreams(caches.BatchKVCache):
    """A batch whose positions MLX keeps in host memory."""

    batch = 2

    def __init__(self) -> None:
        super().__init__([0, 2])


class LongOffsets(caches.BatchKVCache):
    """A batch whose positions are not int32."""

    batch = 3

    def __init__(self) -> None:
        super().__init__([0, 2, 1])
        self.offset = self.offset.astype(mx.int64)


def with_other_norms(model: nn.Module) -> nn.Module:
    """Lets the norms of q and k differ."""
    for block in model.layers:
        if "k_norm" in block.self_attn:
            block.self_attn.k_norm.eps = 0.5
    return model


@pytest.mark.parametrize(
    ("family", "cache"),
    [("llama", TwoStreams), ("llama", LongOffsets), ("qwen3", caches.KVCache)],
)
@pytest.mark.usefixtures("unfused")
def test_other_places_and_norms_are_for_mlxs_rope(
    cuda: list[Plan], family: str, cache: type[Any]
) -> None:
    def make(model: nn.Module) -> Caches:
        return [cache() for _ in model.layers]

    own, model = (
        with_other_norms(tiny(family, mx.float16, **WIDE_HEADS)) for _ in range(2)
    )
    expected = decoded(mlx_marlin.optimize(own, **PACKED, trace=False), make)

    assert_close(decoded(traced(model, **PACKED), make), expected, 2e-3)

    assert not any(plan.problem.epilogue.rotation for plan in cuda)


def test_a_cache_of_other_streams_is_refused_by_mlx(cuda: list[Plan]) -> None:
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), **PACKED)
    with pytest.raises(ValueError, match="offset"):
        model(mx.zeros((4, 1), mx.int32), cache=with_left_padding(model))
    assert not any(plan.problem.epilogue.rotation for plan in cuda)


@pytest.mark.usefixtures("as_on_metal")
def test_gradients_go_through_rotated_heads(cuda: list[Plan]) -> None:
    own = tiny("llama", mx.float16, **WIDE_HEADS)
    mlx_marlin.optimize(own, **PACKED, trace=False)
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), **PACKED)
    x = mx.random.normal((1, 1, 256)).astype(mx.float16)

    def gradient(block: nn.Module) -> mx.array:
        def total(x: mx.array) -> mx.array:
            y: mx.array = block(x, None, caches.KVCache())
            return (y * y).sum()

        found: mx.array = mx.grad(total)(x)
        return found

    found = gradient(model.layers[0])

    assert any(plan.problem.epilogue.rotation for plan in cuda)
    assert_close([found], [gradient(own.layers[0])], 5e-3)


@sampled(5)
@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_every_rope_is_computed(scaling: dict[str, Any], join: bool) -> None:
    model = traced(tiny("llama", rope_scaling=scaling), join=join)

    outputs = decoded(model, one_stream)

    assert_close(
        outputs, decoded(tiny("llama", rope_scaling=scaling), one_stream), 1e-6
    )
    assert graphs(model)


@sampled(2, 4)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("make", [one_stream, with_left_padding])
@pytest.mark.usefixtures("unfused")
def test_layers_without_a_rope_are_traced(
    cuda: list[Plan], make: Callable[[nn.Module], Caches], join: bool
) -> None:
    given = {**WIDE_HEADS, "no_rope_layer_interval": 2}
    packed = {"layout": "marlin", "join": join}
    own = tiny("smollm3", mx.float16, **given)
    own = mlx_marlin.optimize(own, **packed, trace=False)
    expected = decoded(own, make)
    model = traced(tiny("smollm3", mx.float16, **given), **packed)

    assert_close(decoded(model, make), expected, 2e-3)

    specs = [block._inspection.spec for block in model.layers]
    ropes = [dict(spec.before)["rope"].cls.__name__ for spec in specs]
    assert ropes == ["RoPE", "NoPE"]
    rotating = {plan.problem.epilogue.rotation for plan in cuda} - {None}
    assert len(rotating) == join  # those of the first layer


@pytest.mark.filterwarnings("ignore:mlx_marlin. trace=True traces none")
@pytest.mark.usefixtures("stock")
def test_a_rope_that_needs_a_number_runs_in_mlx_lms_code() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = traced(tiny("llama", rope_scaling=scaling))
    assert type(model.layers[0].self_attn.rope) is rope_utils.DynamicNTKScalingRoPE

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny("llama", rope_scaling=scaling), one_stream))
    assert model.layers[0]._inspection.spec is None
