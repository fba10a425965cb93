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
from mlx_marlin.checkpoints.reading import read_checkpoint
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.checkpoints import loading
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.checkpoints.saving import save
from mlx_marlin.warn_once import forget
from support import oracles
from support.foreign_models import CONFIG, write
from support.models import Tokenizer
from support.profiles import sampled

TOKENS = mx.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
NAMES = ["gptq", "gptq-act-order", "awq", "compressed"]
formats = pytest.mark.parametrize("name", NAMES)


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


def test_layers_in_a_format_of_mlx_become_its_own(tmp_path: Path) -> None:
    exact = write(tmp_path / "source", "gptq")
    [*convert(open_source(tmp_path / "source"), tmp_path / "result", layout="mlx")]

    model = load_model(open_source(tmp_path / "result"))
    save(tmp_path / "saved", model, Tokenizer())

    assert type(model.model.layers[0].mlp.up_proj).__module__.startswith("mlx.nn")
    assert_same_answers(model, reference(exact))
    stock, _ = utils.load_model(tmp_path / "saved")
    assert mx.array_equal(model(TOKENS), stock(TOKENS))


@sampled(4, 12)
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["gptq", "symmetric"])
@pytest.mark.parametrize("layout", ["", "mlx", "marlin"])
def test_scales_have_the_dtype_of_the_model_where_that_rounds_none(
    tmp_path: Path, name: str, layout: str, is_exact: bool
) -> None:
    path = tmp_path / "source"
    write(path, name)
    file = path / "model.safetensors"
    arrays = {}
    for key, array in mx.load(str(file)).items():
        is_scale = "scale" in key
        keeps = array.dtype != mx.float16 or (is_scale and not is_exact)
        rounded = array if keeps else array.astype(mx.bfloat16)
        arrays[key] = rounded.astype(mx.float16) if is_scale else rounded
    mx.save_safetensors(str(file), arrays)

    def loaded() -> mx.Dtype:
        if layout:
            [*convert(open_source(path), tmp_path / "result", layout=layout)]
        forget()
        model = load_model(open_source(tmp_path / "result" if layout else path))
        return model(TOKENS).dtype

    if is_exact:
        assert loaded() == mx.bfloat16
        return
    said = r"scales of float16 and other weights of bfloat16.* activations .* float32"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert loaded() == mx.float32
    assert len(warned) == (2 if layout else 1)  # by the conversion and by loading


@pytest.mark.parametrize(("generation", "ends"), [(None, 7), ([7, 9], [7, 9])])
def test_the_tokenizer_is_loaded_with_its_end_tokens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generation: list[int] | None,
    ends: object,
) -> None:
    write(tmp_path, "gptq", eos_token_id=7)
    if generation is not None:
        said = json.dumps({"eos_token_id": generation})
        (tmp_path / "generation_config.json").write_text(said)
    asked = []
    monkeypatch.setattr(
        "mlx_lm.utils.load_tokenizer",
        lambda path, eos_token_ids: asked.append((path, eos_token_ids)),
    )
    model, _ = loading.load(tmp_path)
    assert asked == [(tmp_path, ends)]
    assert not model.training


def test_a_layer_called_linear_is_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(llama.Model):
        def __init__(self, args: llama.ModelArgs) -> None:
            super().__init__(args)
            self.head = {"linear": nn.Linear(64, 32)}

    monkeypatch.setattr(llama, "Model", Model)
    model: Any = Model(llama.ModelArgs.from_dict(CONFIG))
    save(tmp_path / "saved", model, Tokenizer())
    saved = mx.load(str(tmp_path / "saved" / "model.safetensors"))
    assert {"head.linear.weight", "head.linear.bias"} <= saved.keys()
    again: Any = load_model(open_source(tmp_path / "saved"))
    assert mx.array_equal(again.head["linear"].weight, model.head["linear"].weight)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (3, r"source: tensors \['model\.layers\.2.* are missing"),
        (1, r"source: tensor 'model\.layers\.1"),
    ],
)
def test_missing_parameters_and_those_without_a_place_are_named(
    tmp_path: Path, layers: int, message: str
) -> None:
    path = tmp_path / "source"
    write(path, "gptq", num_hidden_layers=layers)
    with pytest.raises(ValueError, match=message):
        load_model(open_source(path))
    with pytest.raises(ValueError, match=message):
        list(convert(open_source(path), tmp_path / "result"))
    assert not (tmp_path / "result").exists()


@sampled(6)
@formats
@pytest.mark.parametrize("options", [{}, {"layout": "mlx"}, {"invariant": True}])
def test_loaded_models_are_optimized_and_restored(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    exact = write(tmp_path, name)
    model = optimize(load_model(open_source(tmp_path)), **options)
    layers = [m for m in model.modules() if isinstance(m, MarlinLinear)]
    assert len(layers) == 14
    assert all(layer.layout == "marlin" for layer in layers)
    assert all(layer.invariant is ("invariant" in options) for layer in layers)
    assert_same_answers(model, reference(exact))
    with pytest.warns(RuntimeWarning, match="restore rounds weights"):
        restore(model)
    assert_same_answers(model, reference(exact))


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
    path, config = packed(tmp_path)
    ours = config["mlx_marlin"]
    record = next(iter(ours["layers"].values()))
    (ours if "version" in changes else record).update(changes)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(open_source(path))
    assert str(path) in str(caught.value)


def packed(folder: Path) -> tuple[Path, Any]:
    """Returns a folder in our layout, and its config."""
    write(folder / "source", "awq")
    [*convert(open_source(folder / "source"), folder / "result")]
    return folder / "result", json.loads((folder / "result/config.json").read_text())


def test_a_long_name_in_a_record_is_not_quoted_whole(tmp_path: Path) -> None:
    path, config = packed(tmp_path)
    layers = config["mlx_marlin"]["layers"]
    layers["y" * 5_000] = layers.pop("model.layers.0.mlp.up_proj")
    (path / "config.json").write_text(json.dumps(config))
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        with pytest.raises(ValueError, match="tensor") as caught:
            list(read(path))
        assert len(str(caught.value).replace(str(path), "")) < 800


@formats
def test_saved_and_loaded_models_have_the_same_bits(tmp_path: Path, name: str) -> None:
    write(tmp_path / "source", name)
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
    write(tmp_path / "source", "awq")
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
    configs = [tmp_path / name / "config.json" for name in ("apart", "joined")]
    assert configs[0].read_text() == configs[1].read_text()
    again, apart = (
        load_model(open_source(tmp_path / name)) for name in ("joined", "apart")
    )
    assert mx.array_equal(again(TOKENS), apart(TOKENS))


def test_nothing_is_left_if_saving_fails(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    model = load_model(open_source(tmp_path / "source"))
    with pytest.raises(AttributeError):
        save(tmp_path / "saved", model, None)
    with pytest.raises(ValueError, match="source exists"):
        save(tmp_path / "source", model, Tokenizer())
    assert {file.name for file in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_model_with_adapters_is_not_saved(tmp_path: Path, use_dora: bool) -> None:
    write(tmp_path / "source", "gptq")
    model = load_model(open_source(tmp_path / "source"))
    adapter: Any = DoRALinear if use_dora else LoRALinear
    model.model.layers[0].mlp.up_proj = adapter.from_base(nn.Linear(64, 64), r=2)

    with pytest.raises(ValueError, match=r"up_proj is an adapter, \w+.*fuse it"):
        save(tmp_path / "saved", model, Tokenizer())

    assert {file.name for file in tmp_path.iterdir()} == {"source"}


def test_saving_keeps_all_settings_and_the_end_tokens(tmp_path: Path) -> None:
    own = {"torch_dtype": "float16", "architectures": ["X"], "extra": {"a": [1]}}
    write(tmp_path / "source", "gptq", **own)
    model = load_model(open_source(tmp_path / "source"))
    assert not [name for name, _ in tree_flatten(model.parameters()) if "extra" in name]
    tokenizer = Tokenizer()
    tokenizer.eos_token_ids = {9, 7}
    save(tmp_path / "saved", model, tokenizer)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.items() >= (CONFIG | own | {"eos_token_id": [7, 9]}).items()
    assert {*config} == {*CONFIG, *own, "eos_token_id", "mlx_marlin"}
