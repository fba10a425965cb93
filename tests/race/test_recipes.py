"""What `optimize` does after each outcome of a race, on each back end.

The oracle is a model of the decision in a few lines, which knows neither recipes nor
the race.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import measured_results, selection
from mlx_marlin.lm import measured_models, recipe
from mlx_marlin.lm.layer_conversion import LayerConversion
from mlx_marlin.lm.measured_models import MeasuredModel
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.lm.race import forward_race, product_race
from mlx_marlin.lm.race.settings import ModelSettings
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.planning.measurement import Forwards
from race.conftest import SimulatedMac
from support.models import tiny_llama

OF_CUDA = {"residual", "gate", "norm", "rope", "experts"}
"""Fusions that CUDA has by default; Metal has the first."""
Given = dict[str, Any]


def expected(on_cuda: bool, given: Given, found: str | None = None) -> Given:
    """Returns the options of a model whose race has found a layout, or nothing yet."""
    layout = given.get("layout") or found or ("marlin" if on_cuda else "mlx")
    default = {"join": on_cuda and layout == "marlin", "trace": on_cuda}
    return {"layout": layout, **default, **{k: v for k, v in given.items() if v}} | {
        name: given[name] for name in default if given.get(name) is not None
    }


def every(**values: tuple[Any, ...]) -> Iterator[Given]:
    """Yields all choices of one value for each name, without those that are None."""
    for chosen in product(*values.values()):
        pairs = zip(values, chosen, strict=True)
        yield {name: value for name, value in pairs if value is not None}


GIVEN = [
    *every(
        layout=(None, "mlx", "marlin"),
        join=(None, False, True),
        trace=(None, False, True),
    )
]


def resolved(model: nn.Module, given: Given, **others: Any) -> recipe.Recipe:
    layout, *_ = (given.get("layout"),)
    named = {name: each for name, each in given.items() if name != "layout"}
    return recipe.resolve(model, LayerConversion(layout=layout), **named, **others)


@pytest.mark.parametrize("found", [None, "mlx", "marlin"])
def test_a_recipe_follows_what_was_given_then_the_race_then_the_back_end(
    machine: SimulatedMac, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    on_cuda, model = selection.backend() == "cuda", tiny_llama()
    asked: list[str] = []

    class Known(dict[str, Forwards]):
        def get(self, key: str, default: Any = None) -> Forwards | None:
            asked.append(key)
            if found is None:
                return None
            return Forwards(key=key, layout=found, seconds={}, date="")

    monkeypatch.setattr(measured_results, "forwards", lambda *_: Known())
    for given in GIVEN:
        told = resolved(model, given)

        # The race of a layout that was given decides nothing about it.
        wanted = expected(on_cuda, given, found)
        assert told.options.items() >= wanted.items(), given
        fused = (OF_CUDA if on_cuda else {"residual"}) if wanted["trace"] else set()
        assert {*told.options["fuse"]} == fused
        sources = dict.fromkeys(told.options, f"default on {told.backend}")
        if found is not None:
            sources["layout"] = "measured"
        assert {name: told.source(name) for name in told.options} == sources | (
            dict.fromkeys(given, "given")
        )
        assert told.decides_layout == ("layout" not in given)
    # The times of a model are those of its options: none is kept for two of them.
    resolved(model, {"layout": "mlx"}, measure=False)
    assert len(asked) == len(GIVEN)
    distinct = {
        repr(expected(on_cuda, given) | {"?": given.get("layout")}) for given in GIVEN
    }
    assert len({*asked}) == len(distinct)


SETTINGS = [
    None,
    *(
        ModelSettings(layout=layout, join=join, trace=trace)
        for layout, join, trace in product(
            ("mlx", "marlin"), (False, True), (False, True)
        )
    ),
    ModelSettings(trace=True, fuse=(*FUSIONS,)),
]


def test_measured_settings_replace_the_defaults_together_or_not_at_all(
    machine: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    if selection.backend() == "cuda":
        assert measured_models.find(tiny_llama()) is None  # there are none
        return
    model = tiny_llama()
    key = measured_models.model_key(model)
    monkeypatch.setattr(measured_results, "forwards", lambda *_: {})
    for settings in SETTINGS:
        fields: Any = dict.fromkeys(("model", "date"), "x")
        tuned = MeasuredModel(
            **fields, key=key, settings=settings, speedups={}, max_ops_per_buffer=None
        )
        measured_models.keep(tuned)
        state.reset()
        for given in GIVEN:
            told = resolved(model, given)
            assert told.measured == (None if given else tuned)
            if given:
                wanted = expected(False, given)
            elif settings is None:
                wanted = {"layout": "stock MLX", "join": False, "trace": False}
            else:
                wanted = settings.options
            assert told.options.items() >= wanted.items()
            assert told.is_stock == (settings is None and not given)
            assert not (told.measured and told.decides_layout)
        # What quantizes plain layers has no part in what was measured.
        for numbers in ({"bits": 8}, {"group_size": 32}, {"bits": 8, "quantize": True}):
            told = recipe.resolve(model, LayerConversion(**numbers))
            assert told.measured == (None if "quantize" in numbers else tuned)


@dataclass(frozen=True)
class Outcome:
    """What the clocks of a race say, and the layout that follows where it is open."""

    packed: float  # Time of a packed product; stock MLX takes 10
    native: float  # That of a product in MLX's layout
    live: float  # Time of a pass with our kernels; stock MLX takes 1
    found: str | None  # None: the default of the back end
    given: Given  # An option of a second model
    shape: tuple[int, int, int] = (64, 160, 1)  # Sizes and number of blocks
    interrupted_after: int | None = None


OUTCOMES = {
    "packed wins": Outcome(7, 12, 0.8, "marlin", {"join": False}),
    "packed wins products only": Outcome(7, 12, 1.2, "mlx", {"join": True}),
    "native wins": Outcome(9, 5, 0.8, "mlx", {"trace": True}, (128, 96, 3)),
    "stock wins": Outcome(12, 12, 1.2, "mlx", {"layout": "marlin"}, (96, 64, 2)),
    "interrupted": Outcome(7, 12, 0.8, None, {"layout": "mlx"}, interrupted_after=0),
}


def llama_of(hidden: int, inner: int, layers: int) -> nn.Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def state_of(model: nn.Module) -> Given:
    """Returns the options that a converted model shows."""
    head, block = model.lm_head, model.layers[-1]
    return {
        "layout": head.layout,
        "join": "joined" in block.self_attn.q_proj,
        "trace": isinstance(block, TracedBlock),
    }


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_model_becomes_what_its_race_has_found_now_and_at_each_later_load(
    machine: SimulatedMac, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setattr(product_race, "ROWS", (2, 8))  # planning takes a while
    monkeypatch.setattr(product_race, "PROMPTS", ())
    monkeypatch.setattr(forward_race, "ROWS", (1, 8))
    case, on_cuda = OUTCOMES[outcome], selection.backend() == "cuda"
    machine.ours = lambda layout, m: case.packed if layout == "marlin" else case.native
    machine.forward = lambda m, ours: case.live if ours else 1.0
    machine.interrupted_after = case.interrupted_after
    found = case.found
    if on_cuda and outcome == "native wins":
        found = "marlin"  # MLX's layout does not compete there
    for given in ({}, case.given):
        wanted = expected(on_cuda, given, found)

        model = machine.optimize(llama_of(*case.shape), **given)

        assert state_of(model) == wanted, given
        dry = mlx_marlin.optimize(llama_of(*case.shape), dry_run=True, **given)
        assert dry.recipe.options.items() >= wanted.items()
    again = machine.optimize(llama_of(*case.shape))
    assert state_of(again) == expected(on_cuda, {}, found)
