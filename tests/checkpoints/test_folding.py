"""The column order of down projections becomes the row order of gate and up."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints import moved_rows
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support import gguf_cases, gguf_models
from support.choose import Choose
from support.profiles import sampled

TOKENS = mx.array([[5, 17, 3, 29, 1]])
ALIASES = {"mistral": "llama"}
"""Types for which mlx-lm has the module of another."""
OTHERS = ("phi3", "qwen3_moe")
"""Models of mlx-lm whose MLP has other layers."""


@pytest.fixture(autouse=True)
def _stock(backend: Choose) -> None:
    backend("stock")


def write(path: Path, model_type: str, gathers: str = "_proj") -> Path:
    """Writes a model with GPTQ weights, of which those that match have act-order."""
    alias, model_type = model_type, ALIASES.get(model_type, model_type)
    case = next(c for c in gguf_cases.CASES.values() if c.model_type == model_type)
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, array in tree_flatten(gguf_models.random_model(case).parameters()):
        if array.ndim == 2 and name.endswith("_proj.weight"):
            order = re.search(gathers, name) is not None
            weight = foreign.drawn_weight(rng, *array.shape, 32, 4, act_order=order)
            weight.scales = (weight.scales / 8).astype(np.float16)
            arrays |= foreign.gptq_arrays(name.removesuffix(".weight"), weight, 2)
        else:
            arrays[name] = np.array(array.astype(mx.float16))
    config = foreign.gptq_config(4, 2, group_size=32) | gguf_models.arguments(case)
    return foreign.Folder(config | {"model_type": alias}, arrays).write(path)


def logits(path: Path) -> np.ndarray:
    model = load_model(open_source(path))
    return np.array(model(TOKENS).astype(mx.float32))


def gathered(path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    with monkeypatch.context() as patch:
        patch.setattr(moved_rows, "MODULES", ())
        return logits(path)


def down_layers(path: Path) -> set[type]:
    model = load_model(open_source(path))
    return {
        type(module)
        for name, module in model.named_modules()
        if name.endswith("down_proj")
    }


@sampled(2, 6)
@pytest.mark.parametrize("model_type", [*moved_rows.MODULES, *ALIASES])
def test_folded_and_gathered_models_have_the_same_bits(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model", model_type)
    folded = logits(path)

    assert down_layers(path) == {MarlinLinear}
    assert np.isfinite(folded).all()
    assert np.ptp(folded) > 0.1
    np.testing.assert_array_equal(folded, gathered(path, monkeypatch))


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_models_gather(model_type: str, tmp_path: Path) -> None:
    assert model_type not in moved_rows.MODULES
    gathers = "down_proj" if model_type == "phi3" else "self_attn"
    path = write(tmp_path / "model", model_type, gathers)
    source = open_source(path)
    model = load_model(source)
    reordered = [m for m in model.modules() if isinstance(m, ReorderedLinear)]
    assert not source.folded
    assert reordered


@pytest.mark.parametrize("gathers", ["down_proj", "(down|up)_proj", "(down|gate)_proj"])
def test_layers_that_adapters_can_address_keep_their_rows(
    gathers: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", "llama", gathers)
    assert down_layers(path) == {ReorderedLinear}


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj"])
def test_moved_layers_refuse_adapters(layer: str, tmp_path: Path) -> None:
    model = load_model(open_source(write(tmp_path / "model", "llama")))
    keys = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": [f"mlp.{layer}"]}
    with pytest.raises(ValueError, match="ReorderedLinear"):
        linear_to_lora_layers(model, 1, keys)


def test_only_rows_of_gate_and_up_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model", "llama")
    folded = dict(open_source(path).parameters())
    monkeypatch.setattr(moved_rows, "MODULES", ())
    plain = dict(open_source(path).parameters())
    for name, value in plain.items():
        own = folded[name]
        if not isinstance(value, StoredWeight):
            assert mx.array_equal(own, value)
            continue
        before, after = value.decoded(), own.decoded()
        if "gate_proj" in name or "up_proj" in name:
            mlp = name.rpartition(".mlp.")[0]
            before = before[plain[f"{mlp}.mlp.down_proj.weight"].input_order]
        assert mx.array_equal(after, before), name
        assert (own.input_order is None) == ("down_proj" in name), name


def test_a_converted_model_has_the_same_bits(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "qwen3")
    rows = {row.name: row.target for row in convert(open_source(path), tmp_path / "to")}
    plans = convert(open_source(path), tmp_path / "no", dry_run=True)
    assert {row.name: row.target for row in plans} == rows
    for name, target in rows.items():
        expected = {"down_proj": ", order folded"}.get(name.split(".")[-2], "")
        if "_proj" in name and not expected:
            expected = ", x gathered"
        assert target.endswith(f"layout{expected}" if expected else target), name
    assert sum(target.endswith(", order folded") for target in rows.values()) == 2
    np.testing.assert_array_equal(logits(tmp_path / "to"), logits(path))


def test_layers_of_other_sizes_are_left_to_the_checks_of_shapes() -> None:
    weights = {
        f"model.layers.0.mlp.{layer}_proj": StoredWeight(
            codes=mx.zeros((rows, 8), mx.uint32),
            scales=mx.zeros((rows, 1)),
            group_size=64,
            bits=4,
            mode="symmetric",
            input_order=mx.arange(64),
        )
        for layer, rows in (("gate", 64), ("up", 32), ("down", 16))
    }
    before = dict(weights)
    assert moved_rows.fold_orders(weights, {}, "llama") == set()
    assert weights == before
