"""Traced families whose blocks differ from llama's in more than names."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_marlin
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.lm.tracing.model_families import FAMILIES
from support.decoder_models import (
    OWN_SIZES,
    SIZES,
    assert_equal,
    decoded,
    one_stream,
    tiny,
    traced,
    with_left_padding,
)
from support.models import Layers, assert_same_model

pytestmark = pytest.mark.usefixtures("stock")

DOCUMENT = Path(__file__).parents[2] / "docs/mlx_lm.md"
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
    assert not isinstance(recurrent, TracedBlock)


def _attention_is_doubled(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> str:
    own = type(model.layers[0].self_attn).__call__
    monkeypatch.setattr(
        type(model.layers[0].self_attn), "__call__", lambda *given: 2 * own(*given)
    )
    return "a method or function that it calls was replaced"


def _mlp_is_adapted(model: nn.Module, _: pytest.MonkeyPatch) -> str:
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    return "it has a LoRALinear"


def _rope_is_unknown(model: nn.Module, _: pytest.MonkeyPatch) -> str:
    for block in model.layers:
        block.self_attn.rope.__class__ = type("Other", (nn.RoPE,), {})
    return "its rope is a Other"


def _stays_on_mlx(model: nn.Module, _: pytest.MonkeyPatch) -> str:
    for block in model.layers:
        joined = block.self_attn.qkv_proj
        joined.__class__ = type("Other", (type(joined),), {})
    return "it has a Other"


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", _attention_is_doubled),
        ("llama", _mlp_is_adapted),
        ("llama", _rope_is_unknown),
        ("phi3", _stays_on_mlx),
        ("phi3", None),
        ("qwen3_moe", None),
        ("qwen3_5", None),
    ],
)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_dry_run_lists_each_block_and_why_it_is_not_traced(
    family: str,
    change: Callable[[nn.Module, pytest.MonkeyPatch], str] | None,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny(family)
    reason = change(model, monkeypatch) if change else None
    options: Any = {"layout": layout, "join": True, "trace": True}

    told = mlx_marlin.optimize(model, dry_run=True, **options)

    if reason is None:
        mlx_marlin.optimize(model, **options)
    else:
        with pytest.warns(RuntimeWarning, match=f"layers.0: {reason}; optimize"):
            mlx_marlin.optimize(model, **options)
    decoded(model, one_stream)
    names = {id(block): name for name, block in model.named_modules()}
    assert [each.name for each in told.blocks] == [names[id(b)] for b in model.layers]
    for each, block in zip(told.blocks, model.layers, strict=True):
        inspection = getattr(block, "_inspection", None)
        traced = inspection is not None and inspection.spec is not None
        assert (each.reason is None) == traced
        if reason:
            assert each.reason == reason
        elif not traced:
            assert each.reason == "it has no self_attn"
    lines = str(told).splitlines()
    assert any(line.split()[:2] == ["block", "count"] for line in lines)
    assert mlx_marlin.optimize(model, layout=layout, dry_run=True).blocks == ()


def test_a_model_without_blocks_says_that_nothing_is_traced() -> None:
    model = Layers(nn.QuantizedLinear(64, 64))

    with pytest.warns(RuntimeWarning, match="none of the model's 0 decoder blocks"):
        mlx_marlin.optimize(model, trace=True)


INHERITED = {
    "gemma3": "gemma3_text",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smollm3": "llama",
    "solar_open": "glm4_moe",
}
"""Modules of `mlx_lm.models` whose models have the blocks of a traced family."""


@pytest.mark.parametrize("module", INHERITED)
def test_models_that_inherit_the_blocks_of_a_family_are_traced(module: str) -> None:
    family = INHERITED[module]
    text = {"model_type": family, **SIZES, **OWN_SIZES.get(family, {})}
    model = traced(tiny(module, text_config=text, vocab_size=100))
    told = mlx_marlin.optimize(model, trace=True, dry_run=True)

    outputs = decoded(model, one_stream)

    own = tiny(module, text_config=text, vocab_size=100)
    assert_equal(outputs, decoded(own, one_stream))
    assert None in [each.reason for each in told.blocks]


def test_the_document_lists_all_traced_families() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    listed = text[text.index("**Supported families**") :].split("A block is recog")[0]
    assert {*re.findall(r"`(\w+)`", listed)} == {*FAMILIES, *INHERITED}
    importing = {
        file.stem
        for file in Path(llama.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        if {node.module, *(each.name for each in node.names)} & {*FAMILIES}
    }
    # Without the first two, whose blocks have parts that nobody else has.
    assert importing - {"prism_hadamard_qwen35", "qwen3_5"} == {*INHERITED}


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
def test_families_of_another_shape_run_untraced_and_say_so(family: str) -> None:
    options = UNTRACED[family]
    assert family not in FAMILIES
    model = tiny(family, **options)
    cls = type(model.layers[0]).__name__
    reason = f"optimize does not trace a {cls}"
    told = mlx_marlin.optimize(model, trace=True, join=True, dry_run=True)
    assert {each.reason for each in told.blocks} == {reason}
    with pytest.warns(RuntimeWarning, match=f"none of the model's 2 .* {reason}"):
        mlx_marlin.optimize(model, trace=True, join=True)
    mlx_marlin.optimize(model, trace=True, join=True, fuse=("gate",))  # not again

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny(family, **options), one_stream))
    assert not any(isinstance(block, TracedBlock) for block in model.layers)
