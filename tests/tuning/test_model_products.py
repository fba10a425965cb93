"""The products of a model that `tune` measures."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin import MarlinLinear, guard
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.lm.race import product_race
from mlx_marlin.lm.race.forward_race import Budget
from mlx_marlin.lm.race.model_products import (
    layers_beyond_caches,
    products_of,
    single_products,
)
from mlx_marlin.lm.race.product_race import ProductRace
from mlx_marlin.lm.report.layer_uses import Target
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.timing import Spread
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.weights.formats import LAYOUTS
from support.decoder_models import tiny
from support.models import Layers, tiny_llama
from support.oracles import Floats, exact


def test_a_models_products_are_found_once_each() -> None:
    found, others = single_products(tiny_llama(tied=False), ["mlx"])

    sizes = {(each.n, each.k) for each in found}
    # Queries and output, keys and values, gate and up, down, head.
    assert sizes == {(64, 64), (32, 64), (160, 64), (64, 160), (100, 64)}
    assert len(found) == 5
    assert others == 0
    assert {each.group_size for each in found} == {32}
    assert {each.dtype for each in found} == {"float32"}


def test_a_tied_head_multiplies_by_the_table_as_it_lies() -> None:
    def layouts(tied: bool) -> dict[int, str]:
        found, _ = single_products(tiny_llama(tied=tied), ["marlin"])
        return {each.n: each.layout for each in found}

    assert layouts(tied=False)[100] == "marlin"
    assert layouts(tied=True)[100] == "mlx"
    assert layouts(tied=True)[160] == "marlin"


def linear(k: int = 128, **format: Any) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(k, 96, bias=False, **format)


def test_layers_keep_their_formats_and_those_that_are_not_ours_are_counted() -> None:
    model = Layers(
        linear(bits=4),
        linear(bits=3, group_size=32),
        linear(mode="mxfp4"),
        linear(mode="mxfp8"),
        linear(mode="nvfp4"),
        linear(96, mode="nvfp4"),  # k is no multiple of 64
        nn.Linear(8, 8),
    )

    found, others = single_products(model, ["mlx"])

    assert others == 1
    assert {(each.mode, each.bits, each.group_size) for each in found} == {
        ("affine", 4, 64),
        ("affine", 3, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    }
    assert {each.scale_dtype for each in found} == {"float32", "uint8"}
    assert {each.dtype for each in found} == {"float32"}


def test_without_any_float_bytes_meet_what_mlx_decodes_them_to() -> None:
    model = Layers(linear(mode="mxfp4"))
    found, _ = single_products(model, LAYOUTS)

    assert {(each.dtype, each.layout) for each in found} == {
        ("bfloat16", "mlx"),
        ("bfloat16", "marlin"),
    }
    model.norm = nn.RMSNorm(8)
    model.norm.weight = model.norm.weight.astype(mx.float16)
    codes, scales = mx.quantize(mx.ones((96, 128)), 16, 4, "nvfp4")
    packed = mlx_marlin.pack(codes, scales, group_size=16, bits=4, mode="nvfp4")
    packed = replace(packed, global_scale=mx.ones(1))  # of float32
    model.layers.insert(0, MarlinLinear.from_packed(packed))
    found, _ = single_products(model, ["mlx"])
    assert {each.dtype for each in found} == {"float16"}
    assert len(found) == 2


def mixtral_of_twelve() -> nn.Module:
    """Returns a model of twelve experts, two of whose products are alike."""
    experts = {"num_local_experts": 12, "num_experts_per_tok": 3}
    return tiny("mixtral", hidden_size=64, num_hidden_layers=1, **experts)


def weights_of(model: nn.Module, are_joined: bool) -> dict[str, Floats]:
    """Returns the weights of a model's layers; of joined ones, that of all."""
    found: dict[str, Floats] = {}
    layers = {path: each for path, each in model.named_modules() if "scales" in each}
    for path in sorted(layers, key=lambda path: path.replace("q_proj", "a_proj")):
        layer = layers[path]
        arrays = (layer[name] for name in ("weight", "scales", "biases"))
        weight = exact(mx.dequantize(*arrays, layer.group_size, layer.bits))
        first = re.sub("[kv]_proj", "q_proj", path).replace("up_proj", "gate_proj")
        name = first if are_joined else path
        found[name] = np.concatenate([found[name], weight]) if name in found else weight
    if "lm_head" in found:
        del found["model.embed_tokens"]  # which multiplies nothing
    return found


RACES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "joined layers": (tiny_llama, {"layout": "marlin", "join": True}, 9),
    "experts of few rows": (mixtral_of_twelve, {"layout": "mlx"}, 3),
    "sorted experts": (mixtral_of_twelve, {"layout": "marlin"}, 64),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", RACES)
def test_each_timed_call_computes_what_its_layer_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "why_not", lambda plan: None)
    monkeypatch.setattr(product_race, "LEAST_ROWS", 9)  # packed weights are decoded too
    made, options, m = RACES[case]
    model = made()
    weights = weights_of(model, "join" in options)
    mlx_marlin.optimize(model, **options)
    timed: dict[tuple[str, type], set[str]] = {}
    # What waits for other products shows them.
    monkeypatch.setattr(
        mx, "depends", lambda y, others: mx.concatenate([y, *others], -1)
    )

    def layer_of(x: Floats, y: Floats, experts: list[mx.array]) -> str:
        """Returns the layer whose product y is."""
        x, y = x.reshape(len(x), -1), y.reshape(len(y), -1)
        chosen = [exact(each).astype(int).reshape(len(x), -1)[:, 0] for each in experts]
        found = []
        for path, weight in weights.items():
            if weight.ndim == 2 + len(chosen) and weight.shape[-1] == x.shape[-1]:
                turned = weight.swapaxes(-1, -2)
                each = (x[:, None] @ turned[chosen[0]])[:, 0] if chosen else x @ turned
                if each.shape == y.shape and np.allclose(each, y, atol=1e-4):
                    found.append(path)
        (only,) = found
        return only

    def measure(calls: Any, inputs: Operands) -> dict[Any, Spread]:
        graph = io.StringIO()
        mx.export_to_dot(graph, inputs.x, *sum(inputs.weights, ()))
        assert "label" not in graph.getvalue()  # all is evaluated
        for arrays in inputs.weights:
            for each in arrays[6:]:  # experts
                rows = exact(each).reshape(len(each), -1)
                assert all(len({*row}) == len(row) for row in rows)
                assert len({*rows[:, 0]}) == (12 if m > 3 else 3)
            for entry, call in calls.items():
                y = exact(call(inputs.x, *arrays))
                found = layer_of(exact(inputs.x), y, [*arrays[6:]])
                timed.setdefault((entry.layout, type(entry.plan)), set()).add(found)
        return {entry: Spread(median=1e-6, samples=3) for entry in calls}

    race = ProductRace(
        device=Target.of(None).place.device,
        clock=Clock(
            name="wall time",
            measure=measure,
            measure_independent=measure,
            weights=lambda _: 1,
            times_stock=True,
        ),
        layouts=LAYOUTS,
        decides_layout=True,
        stock=True,
        known={},
        store=lambda _: None,
        budget=Budget(now=float, end=1.0),
    )
    monkeypatch.setattr(product_race, "ROWS", (m,))
    monkeypatch.setattr(product_race, "PROMPTS", ())
    products = products_of(model, Target.of(None))
    assert sum(len(each.layers) for each in products) == len(weights)
    for product in products:
        built = [y for step in race.steps([product]) for y in step()]
        assert len(built) == sum(
            bool(e.plan) for r in (1, m) for e in race._entries(product, r)
        )
        race._race(product, m)
    batched = {path for path, weight in weights.items() if weight.ndim == 3}
    wanted = {
        **{(layout, MetalPlan): {*weights} - batched for layout in LAYOUTS},
        **{(layout, MetalGatherPlan): batched for layout in LAYOUTS},
        ("marlin", DequantizePlan): {*weights} - batched if m >= 9 else set(),
        ("mlx", type(None)): {*weights},
    }
    assert timed == {kind: paths for kind, paths in wanted.items() if paths}


@pytest.mark.parametrize(
    ("cached", "count"), [(0, 1), (0.9, 1), (1, 2), (6.9, 7), (7, 8), (20, 8)]
)
def test_layers_are_read_in_turn_until_they_exceed_the_caches(
    cached: float, count: int
) -> None:
    model = mlx_marlin.optimize(Layers(*(linear() for _ in range(12))), layout="mlx")
    (product,) = products_of(model, Target.of(None))
    weight = 96 * 128 // 2 + 96 * 2 * 2 * 4  # codes; scales and biases of two groups
    assert layers_beyond_caches(product, 1, caches_of(int(cached * weight))) == count


def caches_of(size: int) -> Any:
    return SimpleNamespace(cache_bytes=size)


@pytest.mark.parametrize(("rows", "read"), [(1, 3), (3, 9), (4, 12), (64, 12)])
def test_rows_read_as_many_experts_as_they_choose_and_there_are(
    rows: int, read: int
) -> None:
    model = mlx_marlin.optimize(mixtral_of_twelve(), layout="mlx")
    (product,) = (
        each for each in products_of(model, Target.of(None)) if "64→96" in each.title
    )
    weight = 96 * 64 // 2 + 96 * 2 * 2 * 4  # as above
    assert product.title == "64→96, 12 experts"
    assert layers_beyond_caches(product, rows, caches_of(read * weight - 1)) == 1
    assert layers_beyond_caches(product, rows, caches_of(read * weight)) == 2


def test_the_product_that_reads_most_in_all_layers_comes_first() -> None:
    for count, names in ((1, ["256→96", "128→96"]), (3, ["128→96", "256→96"])):
        layers = [linear(256), *(linear() for _ in range(count))]
        model = mlx_marlin.optimize(Layers(*layers), layout="mlx")
        assert [each.title for each in products_of(model, Target.of(None))] == names
