"""Tensors that the model has no place for are refused, not converted."""

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from mlx_marlin.checkpoints.folder import new_model
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support.foreign_models import CONFIG, shapes, write

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
