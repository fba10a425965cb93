"""Traced families whose blocks differ from llama's in more than names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from support.models import Layers
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("stock")

DOCUMENT = Path(__file__).parents[2] / "docs/mlx_lm.md"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("olmo_hybrid", {"rope_theta": None}),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [one_stream, with_left_padding])
@pytest.mark.usefixtures("unfused")
def test_other_options_of_a_family_are_traced(
    make: Any, family: str, options: dict[str, Any]
) -> None:
    model = traced(tiny(family, **options), join=True)

    assert_equal(decoded(model, make), decoded(tiny(family, **options), make))

    assert model.layers[1]._inspection.spec is not None


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
@sampled(7)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.usefixtures("unfused")
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
RELATIVE_IMPORTS = re.compile(r"^from \.(?: import (.*)|(\w+) import)", re.MULTILINE)


@sampled(4)
@pytest.mark.parametrize("module", INHERITED)
@pytest.mark.usefixtures("unfused")
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
        for names in RELATIVE_IMPORTS.findall(file.read_text(encoding="utf-8"))
        if {*re.findall(r"\w+", "".join(names))} & {*FAMILIES}
    }
    # Without the first two, whose blocks have parts that nobody else has.
    assert importing - {"prism_hadamard_qwen35", "qwen3_5"} == {*INHERITED}


UNTRACED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
    },
    "mistral4": {
        **OWN_SIZES["deepseek_v3"],
        "rope_parameters": {
            **{"type": "yarn", "rope_theta": 10000.0, "factor": 8.0},
            **{"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
        },
        "head_dim": None,
    },
}


@pytest.mark.usefixtures("unfused")
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
