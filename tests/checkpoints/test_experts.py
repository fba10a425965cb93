"""Experts of several formats, and in an order of their own, are stacked."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import containers, oracles
from support import foreign_checkpoints as foreign
from support.configurations import COMMON, W1_TO_W3, settings_of
from support.containers import TOKENS, Weight
from support.foreign_models import FORMATS
from support.models import Tokenizer
from support.profiles import sampled

OTHERS: dict[str, dict[str, Any]] = {
    "Klear": {},
    "mellum": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0}},
    },
}
"""Modules of mlx-lm with experts that no configuration has."""
MODELS = [
    *("Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "Mixtral-8x7B"),
    *("OLMoE-1B-7B", "ERNIE-4.5-21B-A3B", "LFM2-8B-A1B", "MiniMax-M2"),
    *("Nemotron-3-Nano", "Gemma-4-26B-A4B", "GLM-4.5-Air", "Kimi-Linear-48B-A3B"),
    *("Ling-2.6", *OTHERS),
]
RULES = {
    "parts": {r"down_proj|\.w2$": {"bits": 8}},
    "experts": {r"experts\.1": {"bits": 8}, r"experts\.2": {"group_size": 32}},
}
"""Formats of layers that differ from 4 bits in groups of 64."""
PLAIN_BESIDE = ("Mixtral-8x7B", "Qwen3-Next-80B-A3B")
"""Models of which an expert of each layer is plain, beside quantized ones."""


def write(
    path: Path, name: str, format: str = "gptq", rules: str = "", order: str = "-"
) -> Any:
    """Writes a model, and returns mlx-lm's model of the same numbers in float32."""
    arrays, settings, usual = FORMATS[format]
    rng, own_rules = np.random.default_rng(0), RULES.get(rules, {})

    def weight(layer: str, shape: tuple[int, int]) -> Weight | None:
        if rules == "experts" and name in PLAIN_BESIDE and "experts.3" in layer:
            return None
        found = [own for rule, own in own_rules.items() if re.search(rule, layer)]
        options: dict[str, Any] = usual | (found[0] if found else {})
        # Some layers are symmetric, the others are not.
        options["symmetric"] = rng.random() < 0.3
        options["act_order"] = layer.endswith(order)
        return containers.integers(rng, layer, shape, arrays, **options)

    config = {**COMMON, "model_type": name, **OTHERS.get(name, {})}
    config = config if name in OTHERS else settings_of(name)
    said = foreign.gptq_config(4, 2, dynamic=own_rules) if rules else settings
    return containers.write_model(path, config, weight, said)


def assert_same(model: Any, exact: Any) -> None:
    expected = np.array(exact(TOKENS), np.float64)
    assert oracles.error(model(TOKENS), expected) < 1e-3


@sampled(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rules", ["", *RULES])
def test_a_model_computes_with_its_experts(
    tmp_path: Path, name: str, rules: str
) -> None:
    """Plain ones beside quantized ones keep the dtype of all plain weights."""
    exact = write(tmp_path, name, rules=rules)
    assert_same(load_model(open_source(tmp_path)), exact)


@sampled(1)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("Qwen3-30B-A3B", "gptq"),
        ("Mixtral-8x7B", "compressed"),
        ("GLM-4.5-Air", "gptq"),
    ],
)
def test_an_order_that_all_experts_share_is_kept(
    tmp_path: Path, name: str, format: str
) -> None:
    exact = write(tmp_path / "source", name, format, order="")
    [*convert(open_source(tmp_path / "source"), tmp_path / "result")]
    for folder in ("source", "result"):
        model = load_model(open_source(tmp_path / folder))
        assert any(isinstance(m, ReorderedLinear) for m in model.modules())
        assert_same(model, exact)
    assert mlx_marlin.verify(model, tmp_path / "source", rows=(8,)).passed
    mlx_marlin.optimize(model)
    mlx_marlin.save(tmp_path / "saved", model, Tokenizer())
    again = load_model(open_source(tmp_path / "saved"))
    assert mx.array_equal(again(TOKENS), model(TOKENS))


@sampled(2, 6)
@pytest.mark.parametrize("format", ["gptq", "compressed"])
@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_an_order_of_one_of_three_parts_is_kept(
    tmp_path: Path, part: str, format: str
) -> None:
    exact = write(tmp_path, "Mixtral-8x7B", format, order=part)
    model = load_model(open_source(tmp_path))
    ordered = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, ReorderedLinear)
    }
    assert [W1_TO_W3[name] for name in ordered] == [part]
    assert_same(model, exact)
