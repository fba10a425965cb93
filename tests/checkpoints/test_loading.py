"""Models are loaded from every format, and compute with exactly its weights."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import llama
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

import mlx_marlin
from mlx_marlin import optimize, restore
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints import loading
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.checkpoints.saving import save
from support import foreign_checkpoints as foreign
from support import oracles
from support.foreign_models import CONFIG, write_llama
from support.models import Tokenizer
from support.profiles import sampled

TOKENS = mx.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
FORMATS: dict[str, tuple[Any, dict, dict]] = {
    "gptq": (
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        {"bits": 4},
    ),
    "gptq-act-order": (
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 1),
        foreign.gptq_config(4, 1),
        {"bits": 4, "act_order": True, "least_zero": 1},
    ),
    "awq": (foreign.awq_arrays, foreign.awq_config(), {"bits": 4}),
    "compressed": (
        lambda layer, weight: foreign.compressed_arrays(layer, weight, symmetric=False),
        foreign.compressed_config(3),
        {"bits": 3},
    ),
}


def reference(exact: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of mlx-lm's model with the plain weights in float32."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.load_weights(
        [(name, mx.array(value.astype(np.float32))) for name, value in exact.items()]
    )
    return np.array(model(TOKENS), np.float64)


def assert_same_answers(model: Any, expected: np.ndarray) -> None:
    logits = model(TOKENS)
    assert logits.dtype == mx.float16
    assert oracles.error(logits, expected) < 5e-3
    best, second = np.sort(expected, axis=-1)[..., [-1, -2]].transpose(2, 0, 1)
    clear = best - second > 0.02 * np.abs(expected).max()
    assert clear.mean() > 0.5
    same = np.array(logits.argmax(-1)) == expected.argmax(-1)
    assert same[clear].all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("converted", [False, True])
def test_a_model_computes_with_the_weights_of_the_file(
    tmp_path: Path, name: str, converted: bool
) -> None:
    arrays, settings, options = FORMATS[name]
    path = tmp_path / "source"
    exact = write_llama(path, arrays, settings, **options)
    if converted:
        [*convert(open_source(path), tmp_path / "result")]
        path = tmp_path / "result"

    model = load_model(open_source(path))

    layer = model.model.layers[0].mlp.up_proj
    expected = ReorderedLinear if name == "gptq-act-order" else MarlinLinear
    assert type(layer) is expected
    assert_same_answers(model, reference(exact))


def test_layers_in_a_format_of_mlx_become_its_own(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    exact = write_llama(tmp_path / "source", arrays, settings, **options)
    [*convert(open_source(tmp_path / "source"), tmp_path / "result", layout="mlx")]

    model = load_model(open_source(tmp_path / "result"))

    assert type(model.model.layers[0].mlp.up_proj).__module__.startswith("mlx.nn")
    assert_same_answers(model, reference(exact))


def test_the_tokenizer_is_loaded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path, arrays, {**settings, "eos_token_id": 7}, **options)
    asked = []
    monkeypatch.setattr(
        "mlx_lm.utils.load_tokenizer",
        lambda path, eos_token_ids: asked.append((path, eos_token_ids)),
    )
    model, _ = loading.load(tmp_path)
    assert asked == [(tmp_path, 7)]
    assert not model.training


def test_generation_config_names_the_end_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path, arrays, {**settings, "eos_token_id": 7}, **options)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    asked = []
    monkeypatch.setattr(
        "mlx_lm.utils.load_tokenizer",
        lambda path, eos_token_ids: asked.append((path, eos_token_ids)),
    )
    loading.load(tmp_path)
    assert asked == [(tmp_path, [7, 9])]


def test_saving_keeps_the_end_tokens(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path / "source", arrays, settings, **options)
    tokenizer = Tokenizer()
    tokenizer.eos_token_ids = {9, 7}
    save(tmp_path / "saved", load_model(open_source(tmp_path / "source")), tokenizer)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["eos_token_id"] == [7, 9]


def test_saving_keeps_the_name_of_a_layer_called_linear(tmp_path: Path) -> None:
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG | {"num_hidden_layers": 1}))
    model.head = {"linear": llama.nn.Linear(64, 32)}
    save(tmp_path / "saved", model, Tokenizer())
    saved = mx.load(str(tmp_path / "saved" / "model.safetensors"))
    assert {"head.linear.weight", "head.linear.bias"} <= {*saved}


def test_a_layer_called_linear_is_loaded(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path, arrays, settings, **options)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    weights["head.linear.weight"] = mx.ones((32, 64), mx.float16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    source = open_source(tmp_path)
    source.model.head = {"linear": llama.nn.Linear(64, 32, bias=False)}
    model = load_model(source)
    assert mx.all(model.head["linear"].weight == 1)


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    path = tmp_path / "source"
    write_llama(path, arrays, settings, **options)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    missing = r"source: tensors \['model\.layers\.2.* are missing"
    with pytest.raises(ValueError, match=missing):
        load_model(open_source(path))
    with pytest.raises(ValueError, match=missing):
        list(convert(open_source(path), tmp_path / "result"))
    assert not (tmp_path / "result").exists()


def test_a_parameter_without_a_place_is_named(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    path = tmp_path / "source"
    write_llama(path, arrays, settings, **options)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"source: tensor 'model\.layers\.1"):
        load_model(open_source(path))


@sampled(6)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("options", [{}, {"layout": "mlx"}, {"invariant": True}])
def test_loaded_models_are_optimized_and_restored(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    arrays, settings, wanted = FORMATS[name]
    exact = write_llama(tmp_path, arrays, settings, **wanted)
    model = optimize(load_model(open_source(tmp_path)), **options)
    layers = [m for m in model.modules() if isinstance(m, MarlinLinear)]
    assert len(layers) == 14
    assert all(layer.layout == "marlin" for layer in layers)
    assert all(layer.invariant is ("invariant" in options) for layer in layers)
    assert_same_answers(model, reference(exact))
    with pytest.warns(RuntimeWarning, match="restore rounds weights"):
        restore(model)
    assert_same_answers(model, reference(exact))


def damaged_record(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    ours = config["mlx_marlin"]
    record = next(iter(ours["layers"].values()))
    for name, value in changes.items():
        (ours if name == "version" else record)[name] = value
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"layout": "marlin-tiles-2"}, "expected an object with layout=marlin-tiles-1"),
        ({"n": -1}, "n=-1, expected an integer from 1"),
        ({"k": 2**40}, "k=1099511627776, expected an integer from 1"),
        ({"n": 512}, "words must be uint32"),
        ({"bits": 8}, "words must be uint32"),
        ({"mode": "other"}, "mode='other'"),
        ({"group_size": 48}, "group_size=48"),
    ],
)
def test_a_damaged_record_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    arrays, settings, options = FORMATS["awq"]
    write_llama(tmp_path / "source", arrays, settings, **options)
    path = tmp_path / "result"
    [*convert(open_source(tmp_path / "source"), path)]
    damaged_record(path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(open_source(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_saved_and_loaded_models_have_the_same_bits(tmp_path: Path, name: str) -> None:
    arrays, settings, options = FORMATS[name]
    write_llama(tmp_path / "source", arrays, settings, **options)
    model = load_model(open_source(tmp_path / "source"))

    save(tmp_path / "saved", model, Tokenizer())

    again = load_model(open_source(tmp_path / "saved"))
    before, after = (dict(tree_flatten(m.parameters())) for m in (model, again))
    assert {*before} == {*after}
    for path, array in before.items():
        assert array.dtype == after[path].dtype
        assert mx.array_equal(array, after[path])
    assert mx.array_equal(model(TOKENS), again(TOKENS))
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"source", "saved"}


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_joined_layers_are_saved_apart(tmp_path: Path, layout: str) -> None:
    arrays, settings, options = FORMATS["awq"]
    write_llama(tmp_path / "source", arrays, settings, **options)
    if layout == "mlx":
        [*convert(open_source(tmp_path / "source"), tmp_path / "mlx", layout="mlx")]
    folder = tmp_path / {"mlx": "mlx", "marlin": "source"}[layout]
    apart, model = (load_model(open_source(folder)) for _ in range(2))
    mlx_marlin.optimize(apart, layout=layout)
    mlx_marlin.optimize(model, layout=layout, join=True)
    assert any("joined" in name for name, _ in tree_flatten(model.parameters()))

    for each, name in ((apart, "apart"), (model, "joined")):
        save(tmp_path / name, each, Tokenizer())

    expected, found = (
        mx.load(str(tmp_path / name / "model.safetensors"))
        for name in ("apart", "joined")
    )
    assert {*found} == {*expected}
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    written = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("apart", "joined")
    ]
    assert written[0] == written[1]
    again, apart = (
        load_model(open_source(tmp_path / name)) for name in ("joined", "apart")
    )
    assert mx.array_equal(again(TOKENS), apart(TOKENS))


def test_a_model_without_packed_layers_is_saved_for_mlx_lm(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path / "source", arrays, settings, **options)
    [*convert(open_source(tmp_path / "source"), tmp_path / "mlx", layout="mlx")]
    model = load_model(open_source(tmp_path / "mlx"))
    save(tmp_path / "saved", model, Tokenizer())
    stock, _ = utils.load_model(tmp_path / "saved")
    assert mx.array_equal(model(TOKENS), stock(TOKENS))


def test_nothing_is_left_if_saving_fails(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    write_llama(tmp_path / "source", arrays, settings, **options)
    model = load_model(open_source(tmp_path / "source"))
    with pytest.raises(AttributeError):
        save(tmp_path / "saved", model, None)
    with pytest.raises(ValueError, match="source exists"):
        save(tmp_path / "source", model, Tokenizer())
    assert {file.name for file in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_model_with_adapters_is_not_saved(
    tmp_path: Path, name: str, use_dora: bool
) -> None:
    arrays, settings, options = FORMATS[name]
    write_llama(tmp_path / "source", arrays, settings, **options)
    model = load_model(open_source(tmp_path / "source"))
    model.model.layers[0].mlp.up_proj = _adapter(use_dora)

    with pytest.raises(ValueError, match=r"up_proj is an adapter, \w+.*fuse it"):
        save(tmp_path / "saved", model, Tokenizer())

    assert {file.name for file in tmp_path.iterdir()} == {"source"}


def _adapter(use_dora: bool) -> Any:
    layer = nn.Linear(64, 64)
    return (DoRALinear if use_dora else LoRALinear).from_base(layer, r=2)


def test_saving_keeps_all_settings_of_the_folder(tmp_path: Path) -> None:
    arrays, settings, options = FORMATS["gptq"]
    own = {"torch_dtype": "float16", "architectures": ["X"], "extra": {"a": [1]}}
    write_llama(tmp_path / "source", arrays, settings | own, **options)
    model = load_model(open_source(tmp_path / "source"))
    assert not [name for name, _ in tree_flatten(model.parameters()) if "extra" in name]
    save(tmp_path / "saved", model, Tokenizer())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.items() >= (CONFIG | own).items()
    assert {*config} == {*CONFIG, *own, "mlx_marlin"}
