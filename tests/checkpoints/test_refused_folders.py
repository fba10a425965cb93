"""Folders without an exact meaning, and tensors without a place, are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from safetensors.numpy import load_file, save_file

from mlx_marlin.checkpoints.folder import new_model
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.reading import read_checkpoint
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support.foreign_models import CONFIG, shapes, write


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
def test_plain_integers_are_no_weights_before_and_after_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    codes = mx.ones((256, 128)).astype(dtype)
    saved(tmp_path, CONFIG, {name: codes})
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        with pytest.raises(ValueError, match=rf"'{name}' \(\w+\) is of a quantized"):
            list(read(tmp_path))
    saved(tmp_path, CONFIG, {"codes": codes})
    monkeypatch.setattr(llama.Model, "sanitize", lambda _, a: {name: a["codes"]})
    with pytest.raises(ValueError, match=rf"'{name}' is mlx.*, expected floats"):
        list(open_source(tmp_path).parameters())


FILE = "model.safetensors"
BIAS = "model.layers.0.self_attn.q_proj.bias"
MIXTRAL = CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
}


def gptq_llama(path: Path, **arrays: np.ndarray) -> Path:
    """Writes a llama in GPTQ's format, with more arrays."""
    write(path, "gptq")
    save_file({**load_file(path / FILE), **arrays}, path / FILE)
    return path


def gptq_mixtral(path: Path, *, act_order: bool) -> Path:
    """A mixtral whose experts are in GPTQ's format, and the rest in zeros."""
    rng = np.random.default_rng(0)
    gate = {"model.layers.0.block_sparse_moe.gate": (2, 128)}
    arrays = {
        f"{name}.weight": np.zeros(shape, np.float16)
        for name, shape in (shapes(MIXTRAL) | gate).items()
        if ".mlp." not in name
    }
    experts = {"w1": (256, 128), "w2": (128, 256), "w3": (256, 128)}
    for expert in range(2):
        for name, (n, k) in experts.items():
            weight = foreign.drawn_weight(rng, n, k, 64, 4, act_order=act_order)
            layer = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            arrays |= foreign.gptq_arrays(layer, weight, 2)
    config = foreign.gptq_config(4, 2) | MIXTRAL
    return foreign.Folder(config, arrays).write(path)


def test_stacked_experts_are_converted(tmp_path: Path) -> None:
    source = open_source(gptq_mixtral(tmp_path / "source", act_order=False))
    rows = [*convert(source, tmp_path / "result")]
    packed = {row.name.split(".")[-2] for row in rows if "marlin" in row.target}
    assert packed == {"gate_proj", "up_proj", "down_proj"}
    assert not load_model(open_source(tmp_path / "result")).training


def test_experts_that_mlx_lm_renames_can_be_quantized_alone(tmp_path: Path) -> None:
    path = gptq_mixtral(tmp_path / "source", act_order=False)
    arrays = {
        name.replace("qweight", "weight"): array
        for name, array in load_file(path / FILE).items()
        if name.endswith("weight")
    }
    for name in arrays:
        if ".experts." in name:
            shape = (128, 256) if ".w2." in name else (256, 128)
            arrays[name] = np.ones(shape, np.float16)
    foreign.Folder(MIXTRAL, arrays).write(path)
    how = Quantization(bits=4)
    options = {"quantization": how, "only": "switch_mlp", "dry_run": True}
    rows = [*convert(open_source(path), tmp_path / "result", **options)]
    quantized = {row.name.split(".")[-2] for row in rows if "4-bit" in row.target}
    assert quantized == {"gate_proj", "up_proj", "down_proj"}


TIED = CONFIG | {"tie_word_embeddings": True, "head_dim": 32}
TIED_MODELS = {
    "llama": TIED,
    "olmo2": TIED | {"model_type": "olmo2"},
    "phi3": TIED | {"model_type": "phi3", "rope_scaling": None},
    "gemma4_text": TIED
    | {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
    },
}


@pytest.mark.parametrize("form", ["plain", "quantized"])
@pytest.mark.parametrize("kind", TIED_MODELS)
def test_the_head_of_a_tied_model_is_left_out_if_it_is_the_embedding(
    tmp_path: Path, kind: str, form: str
) -> None:
    config = dict(TIED_MODELS[kind])
    model = new_model(config)
    if form == "quantized":
        nn.quantize(model)
        config["quantization"] = {"group_size": 64, "bits": 4}
    arrays = dict(tree_flatten(model.parameters()))
    head = {
        name.replace("model.embed_tokens", "lm_head"): array
        for name, array in arrays.items()
        if "embed_tokens." in name
    }
    foreign.Folder(config).write(tmp_path)
    mx.save_safetensors(str(tmp_path / FILE), arrays | head)
    rows = {row.name for row in convert(open_source(tmp_path), tmp_path / "result")}
    assert rows == {n for n in arrays if not n.endswith(("scales", "biases"))}
    if kind == "llama":  # whose `sanitize` drops any
        return
    bias = {"lm_head.bias": mx.ones(64)}
    mx.save_safetensors(str(tmp_path / FILE), arrays | bias)
    with pytest.raises(ValueError, match=r"'lm_head\.bias' .*no such tensor"):
        list(open_source(tmp_path).parameters())
    head["lm_head.weight"] = head["lm_head.weight"] + 1
    mx.save_safetensors(str(tmp_path / FILE), arrays | head)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs .*tie_word_embed"):
        list(open_source(tmp_path).parameters())


def test_orders_that_differ_among_experts_are_refused(tmp_path: Path) -> None:
    source = open_source(gptq_mixtral(tmp_path / "source", act_order=True))
    said = r"switch_mlp\.down_proj.*different orders.*again without desc_act"
    with pytest.raises(ValueError, match=said):
        list(convert(source, tmp_path / "result"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_zero_biases_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    path = gptq_llama(tmp_path / "source", **{BIAS: np.zeros(128, np.float16)})
    rows = [*convert(open_source(path), tmp_path / "result")]
    assert BIAS not in {row.name for row in rows}
    load_model(open_source(path))


def test_other_biases_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    path = gptq_llama(tmp_path / "source", **{BIAS: np.ones(128, np.float16)})
    with pytest.raises(ValueError, match=r"q_proj\.bias'.*no such tensor"):
        list(convert(open_source(path), tmp_path / "result"))


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 64), ("intermediate_size", 128)]
)
def test_weights_of_another_size_than_the_config_says_are_refused(
    tmp_path: Path, name: str, value: int
) -> None:
    write(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=r"tensor '.*weight'"):
        load_model(open_source(tmp_path))


def test_no_model_dequantizes_zero_points_as_biases(tmp_path: Path) -> None:
    source = open_source(gptq_llama(tmp_path / "source"))
    layer = "model.layers.0.self_attn.q_proj"

    def sanitize(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        parts = (arrays[f"{layer}.{part}"] for part in ("weight", "scales", "biases"))
        return {f"{layer}.weight": mx.dequantize(*parts, bits=4)}

    source.__dict__["model"] = SimpleNamespace(
        sanitize=sanitize, parameters=lambda: {layer: {"weight": mx.zeros((128, 128))}}
    )
    with pytest.raises(ValueError, match=r"cannot rename.*q_proj\.scales"):
        list(source.parameters())
    assert mx.dequantize.__name__ == "dequantize"
