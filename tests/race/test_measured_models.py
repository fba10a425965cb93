"""`optimize` without arguments uses the settings that `tune` found for a model."""

import json
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import mlx_marlin
from mlx_marlin import cache, state
from mlx_marlin.backends import measured_results, result_files, selection
from mlx_marlin.evidence import codec
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import measured_models, recipe
from mlx_marlin.lm.measured_models import MeasuredModel
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.lm.race import conditions
from mlx_marlin.lm.race.settings import DEFAULTS, ModelSettings
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.warn_once import forget
from support.choose import Choose
from support.models import Layers, arrays, assert_same_model, tiny_llama, types

JOINED = ModelSettings(join=True)
ALL = ModelSettings(layout="marlin", join=True, trace=True, fuse=("residual",))


def result(
    model: nn.Module, chosen: ModelSettings | None, **others: Any
) -> MeasuredModel:
    fields: dict[str, Any] = {
        "model": "tiny",
        "key": measured_models.model_key(model),
        "settings": chosen,
        "speedups": {1: 1.125, 4: 1.25},
        "max_ops_per_buffer": None,
        "date": "2026-11-25",
    }
    return MeasuredModel(**(fields | others))


def keep(chosen: ModelSettings | None, **others: Any) -> Path:
    return write(tiny_llama(), chosen, **others)


def write(model: nn.Module, chosen: ModelSettings | None, **others: Any) -> Path:
    """Keeps a result as another process, which has ended."""
    file = measured_models.keep(result(model, chosen, **others))
    state.reset()
    return file


@pytest.fixture
def kept(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """Keeps results in a folder of the test, as if this machine had a Metal device."""
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    monkeypatch.setattr(selection, "has_device", lambda name: name == "metal")
    backend(None)
    assert selection.backend() == "metal"
    monkeypatch.setattr(conditions, "why_not", lambda *_: "there is no clock")
    yield result_files.folder()
    state.reset()


def assert_same_layers(actual: nn.Module, expected: nn.Module) -> None:
    assert types(actual) == types(expected)
    assert [*arrays(actual)] == [*arrays(expected)]
    for path, array in arrays(expected).items():
        assert mx.array_equal(arrays(actual)[path], array), path


def is_joined(model: nn.Module) -> bool:
    return "joined" in model.layers[0].self_attn.q_proj


def test_without_results_nothing_is_read(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny_llama()
    mlx_marlin.optimize(expected, layout="mlx", join=False, trace=False)
    asked: list[object] = []
    monkeypatch.setattr(measured_models, "model_key", asked.append)

    model = mlx_marlin.optimize(tiny_llama(), measure=False)

    assert_same_layers(model, expected)
    assert asked == []


@pytest.mark.parametrize("chosen", [DEFAULTS, JOINED, ALL])
def test_what_won_replaces_the_defaults(kept: Path, chosen: ModelSettings) -> None:
    expected = mlx_marlin.optimize(tiny_llama(), **chosen.options)
    keep(chosen)

    model = mlx_marlin.optimize(tiny_llama())

    assert_same_layers(model, expected)
    blocks = [each for each in model.modules() if isinstance(each, TracedBlock)]
    assert len(blocks) == (2 if chosen.trace else 0)
    assert_same_layers(mlx_marlin.optimize(model), expected)


@pytest.mark.parametrize(
    "explicit",
    [{"join": False}, {"layout": "mlx"}, {"trace": False}, {"invariant": True}],
)
def test_explicit_arguments_win(kept: Path, explicit: dict[str, Any]) -> None:
    keep(JOINED)

    assert not is_joined(mlx_marlin.optimize(tiny_llama(), **explicit))
    assert is_joined(mlx_marlin.optimize(tiny_llama(), progress=False, layout=None))


def test_a_model_that_is_faster_on_stock_mlx_is_not_converted(kept: Path) -> None:
    keep(None)

    model = mlx_marlin.optimize(tiny_llama())
    dry = mlx_marlin.optimize(tiny_llama(), dry_run=True)

    assert_same_model(model, tiny_llama())
    assert dry.converted == ()
    assert dry.recipe.options["layout"] == "stock MLX"
    reason = "measured here on 2026-11-25: stock MLX is faster"
    assert {*dry.kept.values()} == {reason}
    assert str(dry).endswith(f"measured settings, stock MLX: {reason}")
    converted = mlx_marlin.optimize(tiny_llama(), layout="marlin")
    assert_same_model(mlx_marlin.optimize(converted), tiny_llama())


def test_layers_that_mlx_would_round_stay_where_stock_mlx_is_faster(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported() -> nn.Module:
        mx.random.seed(0)
        model = tiny_llama(tied=False)
        attention = model.layers[0].self_attn
        for name in ("q_proj", "o_proj"):
            plain = nn.Linear(64, 64, bias=False)
            attention[name] = MarlinLinear.from_linear(plain, 16, layout="marlin")
        return model

    write(imported(), None)

    dry = mlx_marlin.optimize(imported(), dry_run=True)
    model = mlx_marlin.optimize(imported())

    assert_same_layers(model, imported())
    paths = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj")]
    assert dry.converted == (*paths,)
    mlx_marlin.optimize(model, layout="marlin", join=True)
    told = mlx_marlin.optimize(model, dry_run=True)
    assert_same_layers(mlx_marlin.optimize(model), imported())
    assert {each.use.action for each in told.layers} == {"converts", "restores"}
    # Where tracing is the default, no block of such a model is traced.
    monkeypatch.setattr(recipe, "is_tracing_faster", lambda: True)
    assert mlx_marlin.optimize(model, dry_run=True).blocks == ()


def test_a_dry_run_and_the_log_say_that_tuned_settings_are_used(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(JOINED)
    monkeypatch.setenv("MLX_MARLIN_LOG", "1")
    state.reset()

    dry = mlx_marlin.optimize(tiny_llama(), dry_run=True)

    expected = (
        "join: measured here on 2026-11-25: 1.12 times stock MLX at 1, 1.25 times "
        "stock MLX at 4 rows"
    )
    assert dry.tuned == expected
    assert (
        f"mlx_marlin: tiny: measured settings, {expected}\n" in capsys.readouterr().err
    )
    assert dry.recipe.options.items() >= JOINED.options.items()
    sources = {name: dry.recipe.source(name) for name in dry.recipe.options}
    tuned = dict.fromkeys(JOINED.options, "measured")
    assert sources == dict.fromkeys(sources, "default on metal") | tuned
    named = mlx_marlin.optimize(tiny_llama(), dry_run=True, join=True)
    assert named.recipe.source("join") == "given"
    assert named.tuned is None
    assert str(dry).endswith(f"measured settings, {expected}")
    assert str(named).endswith(str(dry).partition("\nlayer")[2].rpartition("\n")[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (measured_results.ENVIRONMENT, "0"),
        ("MLX_MARLIN_DEVICE", "Apple M1"),
        *(
            (selection.ENVIRONMENT, name)
            for name in ("metal", "emulator", "stock", "cuda")
        ),
    ],
)
def test_the_environment_turns_it_off(
    kept: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    keep(JOINED)
    monkeypatch.setenv(name, value)
    state.reset()

    assert measured_models.find(tiny_llama()) is None
    assert bool(measured_models.why_not_measured()) == (name == selection.ENVIRONMENT)


def test_a_newer_result_replaces_an_older_one_of_the_same_model(kept: Path) -> None:
    assert keep(JOINED) == keep(ALL)
    other = tiny_llama(tied=False)

    assert measured_models.find(tiny_llama()) == result(tiny_llama(), ALL)
    assert measured_models.find(other) is None
    write(other, JOINED)
    assert measured_models.find(other) == result(other, JOINED)
    assert measured_models.find(tiny_llama()) == result(tiny_llama(), ALL)
    assert [*kept.glob("*.json")] == [keep(ALL)]
    assert result_files.clear(kept) == 1
    state.reset()
    assert measured_models.find(tiny_llama()) is None


@pytest.mark.parametrize("name", ["mlx", "system", "kernels", "cores", "architecture"])
def test_a_result_of_another_version_is_not_used(
    kept: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keep(JOINED)
    own = measured_results.machine
    changed = 3 if name == "cores" else "0.1.2"
    monkeypatch.setattr(
        measured_results,
        "machine",
        lambda *a, **k: replace(own(*a, **k), **{name: changed}),
    )
    state.reset()

    assert measured_models.find(tiny_llama()) is None


def test_files_of_earlier_versions_are_ignored_without_a_message(kept: Path) -> None:
    """The settings had a folder, and results no settings."""
    folder = kept.with_name("models")
    folder.mkdir()
    (folder / "apple-m3-max-40-cores-0123456789abcdef.json").write_text("{}")
    file = keep(JOINED)
    whole = json.loads(file.read_text("utf-8"))
    del whole["settings"]
    file.write_text(json.dumps(whole))
    state.reset()

    assert measured_models.find(tiny_llama()) is None
    assert keep(JOINED) == file
    assert measured_models.find(tiny_llama()) == result(tiny_llama(), JOINED)


def broken(text: str) -> list[str]:
    """Returns texts that `write` cannot have written, made from one that it has."""
    whole = json.loads(text)
    (own,) = whole["settings"]
    changes: tuple[dict[str, Any], ...] = (
        {"settings": {"layout": "odd"}},
        {"settings": own["settings"] | {"layout": "odd"}},
        {"settings": own["settings"] | {"fuse": ["nothing"]}},
        {"settings": own["settings"] | {"join": 1}},
        {"settings": []},
        {"speedups": {"1": -1.0}},
        {"speedups": {"one": 1.0}},
        {"speedups": None},
        {"max_ops_per_buffer": "5; rm"},
        {"max_ops_per_buffer": 0},
        {"key": 5},
        {"more": 1},
    )
    rows = [own | change for change in changes]
    return [json.dumps(whole | {"settings": [row]}) for row in rows]


def test_damaged_settings_are_ignored_with_one_message(kept: Path) -> None:
    file = keep(ALL)
    for text in broken(file.read_text("utf-8")):
        file.write_text(text, "utf-8")
        forget()
        state.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert measured_models.find(tiny_llama()) is None, text
            assert measured_models.find(tiny_llama()) is None
        assert len(caught) == 1, text
        assert "ignored: " in str(caught[0].message)
    keep(ALL)
    assert measured_models.find(tiny_llama()) is not None


def test_a_file_that_others_can_write_is_ignored(kept: Path) -> None:
    keep(JOINED).chmod(0o666)
    state.reset()

    with pytest.warns(RuntimeWarning, match="can be written by other users"):
        assert measured_models.find(tiny_llama()) is None


def test_a_key_depends_on_the_shape_only() -> None:
    keys = {
        measured_models.model_key(model)
        for model in (
            tiny_llama(),
            mlx_marlin.optimize(tiny_llama(), layout="marlin", join=True, trace=True),
            mlx_marlin.optimize(tiny_llama(), layout="mlx"),
        )
    }
    assert len(keys) == 1
    others = [tiny_llama(tied=False), tiny_llama(quantized=False), nn.Linear(8, 8)]
    others.append(tiny_llama())
    others[-1].args.rope_theta += 1
    half = tiny_llama()
    half.set_dtype(mx.float16)
    different = {measured_models.model_key(model) for model in (*others, half)}
    assert len(different) == 5
    assert not different & keys
    experts = (QuantizedSwitchLinear(64, 32, count, bias=False) for count in (4, 12))
    assert len({measured_models.model_key(Layers(each)) for each in experts}) == 2


@dataclass
class Settings:
    """A model's settings as some of mlx-lm's models have them."""

    hidden_size: int = 64
    layers: tuple[dict[str, int], ...] = ({"width": 1}, {"width": 2})
    file_path: str = "/home/me"
    model_file: str = "a.py"
    nickname: str = "a"


def test_a_key_has_every_setting_but_names_and_paths() -> None:
    def key(**changed: Any) -> str:
        model = tiny_llama()
        model.args = Settings(**changed)
        return measured_models.model_key(model)

    assert key(file_path="/home/you", model_file="b.py") == key()
    others = [
        {"hidden_size": 65},
        {"layers": ({"width": 1}, {"width": 3})},
        {"layers": ({"width": 1, "name": 5}, {"width": 2}, {})},
        {"nickname": "b"},  # which only contains the word
    ]
    assert len({key(), *(key(**each) for each in others)}) == 1 + len(others)
    named = ({"width": 1, "name": 5}, {"width": 2})
    assert key(layers=named) == key()


@pytest.mark.parametrize(
    ("value", "is_valid"), [(1, True), (100_000, True), (0, False), (100_001, False)]
)
def test_operations_of_a_buffer_are_few_and_positive(
    value: int, is_valid: bool
) -> None:
    with nullcontext() if is_valid else pytest.raises(ValueError, match=f"={value}, "):
        result(tiny_llama(), JOINED, max_ops_per_buffer=value)


class Scaled(nn.Module):
    """Has scales, and is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = mx.ones((1,))


def test_a_layer_with_scales_of_its_own_is_left_alone(kept: Path) -> None:
    model = tiny_llama()
    model.own_scales = Scaled()
    write(model, JOINED)

    assert is_joined(mlx_marlin.optimize(model))
    assert "convert a Scaled" in str(mlx_marlin.report(model, rows=(1,)))


def test_a_model_whose_settings_cannot_be_read_is_not_tuned(kept: Path) -> None:
    class Unreadable:
        def __deepcopy__(self, _: object) -> None:
            raise RuntimeError("cannot be copied")

    keep(JOINED)
    model = tiny_llama()
    model.args.rope_scaling = Unreadable()

    with pytest.warns(RuntimeWarning, match="settings cannot be read: Runtime"):
        mlx_marlin.optimize(model)
    assert not is_joined(mlx_marlin.optimize(model))  # without a second warning


@given(
    st.builds(
        lambda layout, join, fuse, trace: ModelSettings(
            layout=layout,
            join=join,
            trace=trace or bool(fuse),
            fuse=tuple(name for name in FUSIONS if name in fuse),
        ),
        st.sampled_from(["mlx", "marlin"]),
        st.booleans(),
        st.sets(st.sampled_from([*FUSIONS])),
        st.booleans(),
    )
)
def test_settings_survive_json(drawn: ModelSettings) -> None:
    text = json.dumps(codec.encoded(drawn))

    assert codec.decoded(ModelSettings, json.loads(text)) == drawn
    assert (str(drawn) == "defaults") == (drawn == DEFAULTS)
    assert (drawn.complexity == 0) == (drawn == DEFAULTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": ("residual",)}, r"fuse=.*expected trace=True"),
        ({"fuse": ("nothing",), "trace": True}, r"expected \("),
        ({"layout": "odd"}, "layout='odd'"),
    ],
)
def test_settings_that_contradict_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSettings(**options)


def test_a_report_shows_what_optimize_would_do(kept: Path) -> None:
    before = mlx_marlin.report(tiny_llama(), rows=(1,))
    line = "optimize(model) uses layout=marlin, join, trace, fuse=residual, measured"
    assert line not in str(before)
    keep(ALL)

    found = mlx_marlin.report(tiny_llama(), rows=(1,))

    layouts = {
        layer.use.call.layout
        for layer in found.layers
        if layer.use.request and "proj" in layer.use.name
    }
    assert layouts == {"marlin"}
    assert line in str(found)
    keep(None)
    stock = str(mlx_marlin.report(tiny_llama(), rows=(1,)))
    assert "optimize(model) uses stock MLX, measured here on 2026-11-25" in stock
    assert "] measured here on 2026-11-25: stock MLX is faster" in stock
    named = mlx_marlin.report(tiny_llama(), rows=(1,), chip="M3 Max")
    assert "uses stock MLX" not in str(named)
