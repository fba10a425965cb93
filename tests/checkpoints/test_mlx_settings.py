"""MLX's own checkpoints are read exactly, in the formats of mlx-lm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import llama, qwen3_moe

from mlx_marlin import unpack
from mlx_marlin.checkpoints.reading import read_checkpoint, tensors
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model, needs_import
from mlx_marlin.weights.packed_weight import PackedWeight
from support import foreign_checkpoints as foreign
from support.foreign_models import CONFIG, FORMATS, write_llama

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
AFFINE = {"group_size": 64, "bits": 4}
ROUTER = "model.layers.0.mlp.gate"
ATTENTION = "model.layers.0.self_attn.q_proj"
EXPERTS = CONFIG | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
TOKENS = mx.array([[1, 2, 3, 4, 5]])
Formats = dict[str, dict[str, Any]]


def write(path: Path, config: dict, usual: dict, layers: Formats, said: dict) -> Path:
    """Writes a model whose layers have the usual format, or their own."""
    path.mkdir()
    module = {"llama": llama, "qwen3_moe": qwen3_moe}[config["model_type"]]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))

    def format_of(name: str, layer: nn.Module) -> dict | bool:
        return layers.get(name, usual) if hasattr(layer, "to_quantized") else False

    nn.quantize(model, class_predicate=format_of)
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    settings = {"quantization": usual | said}
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


EIGHT = {"group_size": 64, "bits": 8}
MODELS: dict[str, tuple[dict, dict, Formats, dict]] = {
    "gpt-oss MXFP4-Q8": (
        CONFIG,
        MXFP4,
        dict.fromkeys(("model.embed_tokens", "lm_head", ATTENTION), EIGHT),
        dict.fromkeys(("model.embed_tokens", "lm_head", ATTENTION), EIGHT),
    ),
    "router of 8 bits": (EXPERTS, MXFP4, {ROUTER: EIGHT}, {ROUTER: EIGHT}),
    "the default group size of a mode": (
        CONFIG,
        AFFINE,
        {ATTENTION: MXFP4},
        {ATTENTION: {"mode": "mxfp4"}},
    ),
    "widths that are not named": (
        CONFIG,
        AFFINE,
        # The first has the sizes of the usual format with twice the columns.
        {ATTENTION: {"group_size": 32, "bits": 8}, "lm_head": MXFP4},
        {},
    ),
    "true": (CONFIG, AFFINE, {}, {ATTENTION: True}),
    "another model's layers": (
        CONFIG,
        AFFINE,
        {},
        {"vision_tower.blocks.0.proj": EIGHT, "vision_tower.merger": False},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_the_formats_of_layers_are_those_of_mlx_lm(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "source", *MODELS[name])
    stock, _ = utils.load_model(path)
    assert mx.array_equal(stock(TOKENS), load_model(open_source(path))(TOKENS))
    found = {
        name: (w.mode, w.bits, w.group_size, *w.batch, w.n, w.k * w.bits // 32)
        for name, w in read_checkpoint(path)
        if isinstance(w, PackedWeight)
    }
    assert found == {
        f"{name}.weight": (own.mode, own.bits, own.group_size, *own.weight.shape)
        for name, own in stock.named_modules()
        if "scales" in own
    }


def test_layers_without_a_model_have_the_usual_format(tmp_path: Path) -> None:
    path = write(tmp_path / "source", CONFIG, AFFINE, {}, {})
    (path / "config.json").write_text(json.dumps({"quantization": AFFINE}))
    read = dict(read_checkpoint(path))
    assert read["model.layers.0.mlp.down_proj.weight"].k == 256


def test_layers_that_the_model_drops_may_be_of_any_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "source", CONFIG, AFFINE, {}, {"vision_tower.a": EIGHT})
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    tower = {
        "vision_tower.a.weight": mx.zeros((4, 5), mx.uint32),
        "vision_tower.a.scales": mx.zeros((4, 3)),
    }
    mx.save_safetensors(str(path / "model.safetensors"), arrays | tower)
    sanitize = llama.Model.sanitize

    def without_tower(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        kept = {k: v for k, v in weights.items() if not k.startswith("vision_tower")}
        renamed: dict[str, mx.array] = sanitize(model, kept)
        return renamed

    monkeypatch.setattr(llama.Model, "sanitize", without_tower)
    stock, _ = utils.load_model(path)
    assert mx.array_equal(stock(TOKENS), load_model(open_source(path))(TOKENS))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({ATTENTION: False}, "says that it is not quantized"),
        ({ATTENTION: {"bits": 8}}, "bits=8"),
        ({ATTENTION: {"mode": "nvfp4"}}, "mode='nvfp4'"),
        ({ATTENTION: {"bits": 4, "global_scale": True}}, "'global_scale' is missing"),
        ({ATTENTION: {"bits": 4, "quantize_input": True}}, "quantize_input=True"),
        ({ATTENTION: {"bits": 4, "linear_class": "x"}}, "linear_class='x'"),
        ({"unheard_of": 3}, "unheard_of=3"),
    ],
)
def test_settings_that_contradict_a_layer_are_refused(
    tmp_path: Path, said: dict, message: str
) -> None:
    path = write(tmp_path / "source", CONFIG, AFFINE, {}, said)
    for read in (read_checkpoint, lambda path: open_source(path).parameters()):
        with pytest.raises(ValueError, match=message):
            list(read(path))


def test_layers_have_their_formats_without_a_model(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn.v_proj"
    formats = {ATTENTION: MXFP4, layer: {"group_size": 32, "bits": 8}}
    said = {f"language_model.{layer}": formats[layer]}
    path = write(tmp_path / "source", CONFIG, AFFINE, formats, said)
    read = dict(read_checkpoint(path))
    found = {name: read[f"{name}.weight"] for name in (ATTENTION, layer, "lm_head")}
    assert {name: (w.mode, w.bits, w.group_size, w.k) for name, w in found.items()} == {
        ATTENTION: ("mxfp4", 4, 32, 128),
        layer: ("affine", 8, 32, 128),
        "lm_head": ("affine", 4, 64, 128),
    }


def test_a_format_that_shapes_do_not_tell_is_refused(tmp_path: Path) -> None:
    formats = {ATTENTION: {"group_size": 32, "bits": 8}}
    usual = {"group_size": 64, "bits": 6}
    path = write(tmp_path / "source", CONFIG, usual, formats, {})
    assert [*read_checkpoint(path)]
    assert [*open_source(path).parameters()]
    for no_model in ({}, CONFIG | {"model_file": "mine.py"}):
        said = json.dumps(no_model | {"quantization": usual})
        (path / "config.json").write_text(said)
        message = rf"'{ATTENTION}\.weight'.* does not name the"
        with pytest.raises(ValueError, match=message):
            list(read_checkpoint(path))


def test_settings_inside_of_text_config_are_gone_after_a_conversion(
    tmp_path: Path,
) -> None:
    arrays, settings, options = FORMATS["gptq"]
    inside = {"hidden_size": 128, **settings}
    write_llama(tmp_path / "source", arrays, {"text_config": inside}, **options)
    assert needs_import(tmp_path / "source")
    assert [*convert(open_source(tmp_path / "source"), tmp_path / "result")]
    config = json.loads((tmp_path / "result" / "config.json").read_text())
    assert config["text_config"] == {"hidden_size": 128, "model_type": "llama"}
    assert "quantization_config" not in config
    read = dict(read_checkpoint(tmp_path / "result"))
    assert read[f"{ATTENTION}.weight"].mode == "zero_point"


MODES = [
    *(("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def saved(path: Path, arrays: dict[str, mx.array], config: dict) -> Path:
    foreign.Folder(config).write(path)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return path


@pytest.mark.parametrize(("mode", "bits", "group_size"), MODES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_mode_is_read_exactly(
    tmp_path: Path, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    w = mx.random.normal((40, 256), key=mx.random.key(bits)).astype(dtype)
    parts = mx.quantize(w, group_size, bits, mode)
    names = ("weight", "scales", "biases")
    layer = {f"a.{name}": part for name, part in zip(names, parts, strict=False)}
    settings = {"mode": mode, "bits": bits, "group_size": group_size}
    path = saved(tmp_path, {**layer, "norm.weight": w[0]}, {"quantization": settings})
    read = dict(read_checkpoint(path))
    for stored, back in zip(parts, unpack(read["a.weight"]), strict=True):
        assert mx.array_equal(stored, back)
    assert mx.array_equal(read["norm.weight"], w[0])
    assert {*read} == {"a.weight", "norm.weight"}


def test_tensors_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    w = mx.random.normal((32, 128), key=mx.random.key(0)).astype(mx.float16)
    path = saved(tmp_path, {"a.weight": w}, {})
    (tensor,) = tensors(path)
    assert (tensor.name, tensor.format, tensor.shape) == ("a.weight", "F16", (32, 128))
    assert tensor.nbytes == w.nbytes
    assert mx.array_equal(tensor.read(), w)
    assert mx.array_equal(tensor.read(), w)  # a second time from the file again
