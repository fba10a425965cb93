"""Folders that cannot be read exactly are refused by name."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from mlx_marlin.checkpoints.reading import read_checkpoint
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from support import foreign_checkpoints as foreign
from support.foreign_models import CONFIG, write


def saved(path: Path, config: dict, arrays: dict[str, mx.array]) -> Path:
    foreign.Folder(config).write(path)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return path


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("value", [5, "4-bit", [], True])
def test_settings_that_are_no_object_are_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    saved(tmp_path, {key: value}, {"a.weight": mx.ones((2, 2))})
    said = rf"config\.json: {key}=.*, expected an object"
    with pytest.raises(ValueError, match=said):
        list(read_checkpoint(tmp_path))


ERRORS = (AttributeError, TypeError, KeyError, IndexError, AssertionError)


@pytest.mark.parametrize("error", [*ERRORS, ZeroDivisionError])
def test_an_error_of_mlx_lm_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    saved(tmp_path, CONFIG, {"model.norm.weight": mx.ones(128)})

    def sanitize(*_: object) -> None:
        raise error("a strange tensor")

    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    said = rf"{tmp_path.name}: .* 'llama' model: {error.__name__}.*a strange tensor"
    with pytest.raises(ValueError, match=said):
        list(open_source(tmp_path).parameters())


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 0}, {"num_hidden_layers": "x"}, {"rope_scaling": [1]}],
)
def test_a_config_that_no_model_takes_is_refused(tmp_path: Path, change: dict) -> None:
    saved(tmp_path, CONFIG | change, {"model.norm.weight": mx.ones(128)})
    with pytest.raises(ValueError, match="mlx-lm has no model for it"):
        list(open_source(tmp_path).parameters())


def test_a_weight_of_another_k_than_the_model_says_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = foreign.drawn_weight(rng, 128, 256, 64, 4)
    layer = "model.layers.0.self_attn.q_proj"
    arrays = foreign.gptq_arrays(layer, weight, 2)  # 8 bits in groups of 32 of k=128
    config = CONFIG | foreign.gptq_config(4, 2)
    foreign.Folder(config, arrays).write(tmp_path)
    said = rf"tensor '{layer}\.weight' of shape \(128, 256\), expected \(128, 128\)"
    with pytest.raises(ValueError, match=said):
        list(open_source(tmp_path).parameters())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.norm.weight_scale_inv"])
def test_plain_weights_of_fp8_are_refused(tmp_path: Path, name: str) -> None:
    foreign.Folder(CONFIG).write(tmp_path)
    entry = {"dtype": "F8_E4M3", "shape": [128], "data_offsets": [0, 128]}
    header = json.dumps({name: entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        said = rf"model\.safetensors: tensor '{name}' is F8_E4M3"
        with pytest.raises(ValueError, match=said):
            list(read(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_file", "mine.py", "model_file='mine.py': the code of another model"),
        ("quantize_activations", True, "quantize_activations=True: layers that round"),
    ],
)
def test_keys_that_ask_for_other_code_are_refused(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    write(tmp_path, "gptq", **{key: value})
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=rf"config\.json: {said}"):
        open_source(tmp_path)
    write(tmp_path, "gptq", **{key: None})
    assert [*open_source(tmp_path).parameters()]


@pytest.mark.parametrize("part", ["weight", "input_order"])
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "compressed"])
def test_a_tensor_of_a_quantized_layer_may_not_be_there_as_an_array_too(
    tmp_path: Path, name: str, part: str
) -> None:
    write(tmp_path, name)
    twice = f"model.layers.1.mlp.up_proj.{part}"
    more = {twice: mx.ones((256, 128), mx.float16)}
    mx.save_safetensors(str(tmp_path / "model-more.safetensors"), more)
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        with pytest.raises(ValueError, match=rf"'{twice}' is there twice.*remove"):
            list(read(tmp_path))


WHOLE = [mx.int8, mx.uint8, mx.bool_, mx.int32, mx.int64]


@pytest.mark.parametrize("dtype", WHOLE)
def test_plain_integers_are_no_weights(tmp_path: Path, dtype: mx.Dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    saved(tmp_path, CONFIG, {name: mx.ones((256, 128)).astype(dtype)})
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        with pytest.raises(ValueError, match=rf"'{name}' \(\w+\) is of a quantized"):
            list(read(tmp_path))


@pytest.mark.parametrize("dtype", WHOLE)
def test_plain_integers_are_no_parameters_once_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    arrays = {"codes": mx.ones((256, 128)).astype(dtype)}
    saved(tmp_path, CONFIG, arrays)
    name = "model.layers.0.mlp.up_proj.weight"
    monkeypatch.setattr(llama.Model, "sanitize", lambda _, a: {name: a["codes"]})
    with pytest.raises(ValueError, match=rf"'{name}' is mlx.*, expected floats"):
        list(open_source(tmp_path).parameters())
