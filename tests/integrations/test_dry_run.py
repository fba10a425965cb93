"""`optimize(model, dry_run=True)` tells what becomes of each layer."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear

import mlx_marlin
from mlx_marlin.lm import layer_conversion, recipe
from mlx_marlin.lm import optimize as optimizing
from mlx_marlin.lm.layer_conversion import LayerConversion, keep_on_stock
from support.models import arrays, tiny_llama, types

DOCUMENT = Path(__file__).parents[2] / "docs" / "mlx_lm.md"
pytestmark = pytest.mark.usefixtures("stock")


class Layers(nn.Module):
    """Layers that `optimize` treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.converted = nn.QuantizedLinear(128, 64)
        self.plain = nn.Linear(128, 64)
        self.narrow = nn.Linear(48, 64)
        self.short = nn.QuantizedLinear(80, 64, mode="nvfp4")
        self.tokens = nn.QuantizedEmbedding(64, 80, mode="nvfp4")
        self.norm = nn.RMSNorm(64)
        self.other = type("Other", (nn.QuantizedLinear,), {})(128, 64)
        self.sharded = nn.QuantizedShardedToAllLinear(128, 64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "marlin"},
        {"layout": "marlin", "join": True},
        {"quantize": True, "group_size": 32},
    ],
    ids=str,
)
def test_it_tells_what_optimize_does(options: dict[str, Any]) -> None:
    for model in (tiny_llama(tied=True), Layers()):
        before = types(model)

        told = mlx_marlin.optimize(model, dry_run=True, **options)

        assert types(model) == before
        mlx_marlin.optimize(model, **{**options, "join": False})
        after = types(model)
        assert {*told.converted} == {
            name for name in after if after[name] is not before[name]
        }
        uses = [each.use for each in told.layers if each.use.layout]
        layouts = {path: use.layout for use in uses for path in use.paths}
        modules: dict[str, Any] = dict(model.named_modules())
        assert layouts == {
            name: getattr(modules[name], "layout", "mlx") for name in told.converted
        }


def test_each_layer_that_stays_has_its_reason() -> None:
    told = mlx_marlin.optimize(Layers(), dry_run=True)

    assert told.converted == ("converted", "sharded")
    assert told.kept["plain"].startswith(
        "not quantized; optimize(model, quantize=True)"
    )
    assert told.kept["other"] == "optimize does not convert a Other"
    assert "norm" not in told.kept
    quantized = mlx_marlin.optimize(Layers(), dry_run=True, quantize=True)
    assert quantized.converted == ("converted", "plain", "sharded")
    assert quantized.kept["narrow"] == "k=48 is not a multiple of group_size=64"
    model = Layers()
    keep_on_stock(model, ["converted"])
    kept = mlx_marlin.optimize(model, dry_run=True, quantize=True).kept
    assert kept["converted"] == "its error was above the limit of mlx-marlin verify"


def heads(k: int = 64) -> nn.Module:
    layer = MultiLinear(k, 40, 2).to_quantized(group_size=16, bits=4, mode="nvfp4")
    layer.set_dtype(mx.float16)
    return layer


ON_METAL, ON_CUDA = True, False
SUMS = "sums of machines, and heads on CUDA, are not invariant"
REFUSED: dict[str, tuple[Callable[[], nn.Module], bool, bool, str | None]] = {
    "heads": (heads, ON_METAL, False, None),
    "invariant heads": (heads, ON_METAL, True, None),
    "invariant heads on CUDA": (heads, ON_CUDA, True, SUMS),
    "short heads": (lambda: heads(80), ON_METAL, False, "k=80 is not a multiple of"),
    "a sum of machines": (
        lambda: nn.QuantizedShardedToAllLinear(128, 64),
        *(ON_METAL, True),
        SUMS,
    ),
    "part of one": (
        lambda: nn.QuantizedShardedToAllLinear(128, 64),
        *(ON_METAL, False),
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_converts_or_has_its_reason(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, is_on_metal, invariant, reason = REFUSED[case]

    def supports(invariant: bool) -> bool:
        return is_on_metal or not invariant

    monkeypatch.setattr(layer_conversion, "supports_heads", supports)
    monkeypatch.setattr(optimizing, "supports_heads", supports)
    conversion = LayerConversion(invariant=invariant)
    layer = made()

    assert conversion.applies_to(layer) == (reason is None)
    assert reason is None or conversion.why_not(layer).startswith(reason)
    converted = LayerConversion().convert(layer) if "short" not in case else layer
    remains = optimizing._remains_variant(converted, LayerConversion(invariant=True))
    assert remains == (case != "heads" and case != "invariant heads")


def test_blocks_that_are_missing_are_told_to_who_asked_for_tracing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "is_tracing_faster", lambda: True)

    mlx_marlin.optimize(Layers())  # without a warning

    with pytest.warns(RuntimeWarning, match="trace"):
        mlx_marlin.optimize(Layers(), trace=True)


@pytest.mark.parametrize("join", [False, True])
def test_a_converted_model_stays_converted(join: bool) -> None:
    model = mlx_marlin.optimize(tiny_llama(tied=True), layout="marlin", join=join)

    told = mlx_marlin.optimize(model, dry_run=True, layout="marlin")

    assert told.kept == {}
    assert len(told.converted) == (1 + 2 * 4 if join else 1 + 2 * 7)
    assert ("model.layers.0.self_attn.q_proj+k_proj+v_proj" in told.converted) is join


def test_the_table_has_a_line_for_equal_layers() -> None:
    told = mlx_marlin.optimize(tiny_llama(tied=True), dry_run=True)
    lines = str(told).removeprefix(f"{told.recipe}\n").splitlines()

    assert lines[0].startswith("layer ")
    (line,) = (line.split() for line in lines if "down_proj" in line)
    name = "model.layers.*.mlp.down_proj"
    assert line == [name, "2", "QuantizedLinear", "converts", "mlx", "-"]
    assert len(lines) == 1 + 7 + 1


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"join": False},
        {"layout": "marlin", "trace": True, "fuse": ("norm", "residual")},
        {"quantize": True, "group_size": 32, "bits": 8, "invariant": True},
    ],
    ids=str,
)
def test_a_recipe_says_what_each_option_is_and_where_it_is_from(
    given: dict[str, Any], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "is_tracing_faster", lambda: is_faster)
    fused = ("residual",) if is_faster else ()
    expected: dict[str, Any] = {
        "layout": "mlx",
        "quantize": False,
        "group_size": 64,
        "bits": 4,
        "invariant": False,
        "join": is_faster,
        "trace": is_faster,
        "fuse": fused,
        "compute": None,
        "measure": True,
    } | given
    expected["fuse"] = (*sorted(expected["fuse"], reverse=True),)

    told = mlx_marlin.optimize(tiny_llama(), dry_run=True, **given).recipe

    assert told.options == expected
    sources = {name: told.source(name) for name in expected}
    assert sources == dict.fromkeys(expected, "default on stock") | dict.fromkeys(
        given, "given"
    )
    again = mlx_marlin.optimize(tiny_llama(), dry_run=True, **told.options).recipe
    assert again.options == expected
    heads, *rows = (line.split(maxsplit=2) for line in str(told).splitlines())
    assert heads == ["option", "value", "from"]
    assert [name for name, *_ in rows] == [*expected]
    assert {name: source for name, _, source in rows} == sources


def test_the_document_shows_the_text_of_a_recipe() -> None:
    told = mlx_marlin.optimize(tiny_llama(), join=True, dry_run=True).recipe

    shown = re.search(r"```text\n(option .*?)```", DOCUMENT.read_text(), re.DOTALL)

    assert shown is not None
    assert shown[1].rstrip() == str(replace(told, backend="metal"))


def test_it_refuses_what_optimize_refuses() -> None:
    model = Layers()
    before = arrays(model)

    with pytest.raises(ValueError, match="would stay as"):
        mlx_marlin.optimize(model, dry_run=True, invariant=True)
    with pytest.raises(ValueError, match="no layer to convert"):
        mlx_marlin.optimize(nn.Linear(64, 64), dry_run=True)
    assert arrays(model).keys() == before.keys()
