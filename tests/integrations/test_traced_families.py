"""Traced families whose blocks differ from llama's in more than names."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.integrations.tracing.block import TracedBlock
from mlx_marlin.integrations.tracing.model_families import FAMILIES
from support.decoder_models import (
    assert_equal,
    decoded,
    one_stream,
    tiny,
    traced,
    with_left_padding,
)
from support.models import assert_same_model

pytestmark = pytest.mark.usefixtures("stock")

HYBRID = ("olmo_hybrid", "qwen3_5", "qwen3_next")
"""Families with layers that have no attention."""
SIGMOIDS = ("dots1", "ernie4_5_moe", "glm4_moe")
"""Families whose experts are chosen by rules that no kernel has."""


def scaled(layer: Any) -> None:
    layer.mlp.gate.routed_scaling_factor = 4.0


def corrected(layer: Any) -> None:
    layer.mlp.gate.e_score_correction_bias = mx.array([9.0, 0.0, 0.0, 9.0])


def unnormalized(layer: Any) -> None:
    layer.mlp.gate.norm_topk_prob = False


def without_shared(layer: Any) -> None:
    layer.mlp.config.n_shared_experts = None


def chosen(layer: Any) -> None:
    layer.mlp.k = 1


def normed(layer: Any) -> None:
    layer.self_attn.q_norm.eps = 0.5


def replaced(layer: Any) -> None:
    layer.self_attn.q_proj = nn.Linear(128, layer.self_attn.q_proj.scales.shape[0])


@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("dots1", scaled),
        ("dots1", corrected),
        ("glm4_moe", unnormalized),
        ("glm4_moe", without_shared),
        ("ernie4_5_moe", chosen),
        ("olmo_hybrid", normed),
        ("qwen3_5", replaced),
        ("qwen3_next", normed),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_change_counts_for_the_next_token(
    family: str, change: Callable[[Any], None], join: bool
) -> None:
    def generated(model: nn.Module, *, changed: bool) -> list[mx.array]:
        cache, outputs = one_stream(model), []
        for index, tokens in enumerate(([3, 1, 4, 1, 5], [9], [2], [6])):
            if index == 2 and changed:
                mx.random.seed(1)
                change(model.layers[1])
            outputs.append(model(mx.array([tokens]), cache=cache))
            mx.eval(outputs[-1])
        return outputs

    expected = generated(tiny(family), changed=True)
    model = traced(tiny(family), join=join)

    assert_equal(generated(model, changed=True), expected)

    unchanged = generated(tiny(family), changed=False)
    assert not mx.allclose(expected[2], unchanged[2], rtol=1e-3)


@pytest.mark.parametrize("family", [*HYBRID, *SIGMOIDS])
def test_restore_gives_back_the_blocks(family: str) -> None:
    model = traced(tiny(family), layout="marlin", join=True)
    tokens = mx.array([[7]])
    mx.eval(model(tokens, cache=one_stream(model)))

    assert_same_model(mlx_marlin.restore(model), tiny(family))


@pytest.mark.parametrize("make", [one_stream, with_left_padding])
def test_attention_may_have_no_rope(make: Any) -> None:
    model = traced(tiny("olmo_hybrid", rope_theta=None), join=True)

    outputs = decoded(model, make)

    assert_equal(outputs, decoded(tiny("olmo_hybrid", rope_theta=None), make))
    assert model.layers[1]._inspection.spec is not None


@pytest.mark.parametrize("family", HYBRID)
def test_layers_without_attention_run_their_own_code(family: str) -> None:
    model = traced(tiny(family))
    decoded(model, one_stream)

    recurrent, attending = model.layers
    assert attending._inspection.spec is not None
    known = isinstance(recurrent, TracedBlock)
    assert not known or recurrent._inspection.spec is None


@pytest.mark.parametrize("act", ["softmax", "sigmoid"])
def test_ernie_chooses_by_softmax_or_sigmoid(act: str) -> None:
    model = traced(tiny("ernie4_5_moe", moe_gate_act=act))

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny("ernie4_5_moe", moe_gate_act=act), one_stream))
    assert all(block._inspection.spec is not None for block in model.layers)


def test_an_activation_that_was_patched_is_not_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.Softmax, "__call__", lambda _, x: mx.softmax(2 * x, -1))
    model = traced(tiny("ernie4_5_moe"))

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny("ernie4_5_moe"), one_stream))
    dense, mixture = (block._inspection.spec for block in model.layers)
    assert dense is not None
    assert mixture is None


LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 1,
}
UNTRACED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
    },
    "mistral4": {
        **LATENT,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
        "head_dim": None,
    },
}


@pytest.mark.parametrize("family", UNTRACED)
def test_families_of_another_shape_run_untraced(family: str) -> None:
    options = UNTRACED[family]
    assert family not in FAMILIES
    model = tiny(family, **options)
    mlx_marlin.optimize(model, trace=True, join=True)

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny(family, **options), one_stream))
    assert not any(isinstance(block, TracedBlock) for block in model.layers)
