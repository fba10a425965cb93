"""The files that heads are kept in, and what is refused."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from shutil import copyfile
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest

import mlx_marlin
from checkpoints.test_containers import with_dtype
from mlx_marlin import load_heads
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.drafts.heads import DraftHead
from support import head_models, quantized_folder
from support.head_models import stored, trunk, write

Tensors = dict[str, mx.array]
TOKENS = mx.array([[3, 1, 4, 1]])


def logits(head: DraftHead, seed: int = 5) -> mx.array:
    """Returns what a head says of some tokens and hidden states."""
    hidden = mx.random.normal((1, 4, 64), key=mx.random.key(seed))
    found = head(TOKENS, hidden, head.make_cache())
    mx.eval(found)
    return found


def shifted(tensors: Tensors) -> Tensors:
    """Returns a head whose norms are stored as 1 + w."""
    return {
        name: array + (array.ndim == 1 and "norm" in name)
        for name, array in tensors.items()
    }


def apart(tensors: Tensors) -> Tensors:
    """Returns a head as repositories of heads alone have it."""
    found = {name.removeprefix("mtp."): each for name, each in tensors.items()}
    start = "layers.0.mlp."
    if (both := found.pop(f"{start}experts.gate_up_proj", None)) is not None:
        gate, up = mx.split(both, 2, axis=1)
        down = found.pop(f"{start}experts.down_proj")
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        found |= {f"{start}switch_mlp.{n}.weight": each for n, each in parts.items()}
    return shifted(found)


def one_by_one(tensors: Tensors) -> Tensors:
    """Returns a head with experts that are stored one by one."""
    found, start = dict(tensors), "mtp.layers.0.mlp.experts"
    gate, up = mx.split(found.pop(f"{start}.gate_up_proj"), 2, axis=1)
    down = found.pop(f"{start}.down_proj")
    for name, each in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
        found |= {f"{start}.{i}.{name}.weight": own for i, own in enumerate(each)}
    return found


def within(tensors: Tensors) -> Tensors:
    """Returns a head among tensors of its model, as in one file of the original."""
    others = {"lm_head.weight": mx.zeros(4), "model.layers.0.norm.weight": mx.zeros(4)}
    return {f"language_model.{name}": each for name, each in tensors.items()} | others


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (shifted, {}),
        (apart, {"model_type": "qwen3_5_mtp"}),
        (one_by_one, {"quantization_config": GPTQ}),  # of the model's layers
        (within, {"quantization": {"group_size": 64, "bits": 4}}),
    ],
    ids=["shifted", "apart", "one by one", "within"],
)
def test_a_head_is_the_same_in_each_of_its_files(
    change: Callable[[Tensors], Tensors], settings: dict[str, Any], tmp_path: Path
) -> None:
    model, tensors = trunk("qwen3_5_moe"), stored("qwen3_5_moe")
    expected = logits(load_heads(write(tmp_path / "a", tensors), model, bits=None))
    folder = write(tmp_path / "b", change(tensors), **settings)
    found = logits(load_heads(folder, model, bits=None))
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "step3p5", "glm4_moe"])
def test_norms_are_shifted_once_and_only_if_they_are_stored_less_one(
    family: str, tmp_path: Path
) -> None:
    """Experts one by one let mlx-lm shift some of them too."""
    head = load_heads(write(tmp_path, stored(family)), trunk(family), bits=None)
    for name, array in nn.utils.tree_flatten(head.block.parameters()):
        if array.ndim == 1 and "norm" in name:
            assert 0.8 < mx.mean(array).item() < 1.2, name


def test_codes_stay_as_they_are_stored_and_plain_weights_get_bits(
    tmp_path: Path,
) -> None:
    model, tensors = trunk("qwen3_5"), stored("qwen3_5")
    q_proj = "mtp.layers.0.self_attn.q_proj"
    codes, scales, biases = mx.quantize(tensors.pop(f"{q_proj}.weight"), 32, 8)
    parts = {"weight": codes, "scales": scales, "biases": biases}
    folder = write(tmp_path, tensors | {f"{q_proj}.{n}": a for n, a in parts.items()})

    head = load_heads(folder, model)

    layer = head.block.layers[0].self_attn
    assert (layer.q_proj.bits, layer.q_proj.group_size) == (8, 32)
    assert mx.array_equal(layer.q_proj.weight, codes)
    assert (layer.o_proj.bits, layer.o_proj.group_size) == (4, 64)
    plain = load_heads(folder, model, bits=None).block.layers[0].self_attn
    assert type(plain.o_proj) is nn.Linear
    assert plain.q_proj.bits == 8
    router = load_heads(
        write(tmp_path / "moe", stored("qwen3_next")), trunk("qwen3_next")
    )
    assert router.block.layers[0].mlp.gate.bits == 8  # as mlx-lm has it
    assert router.block.layers[0].mlp.switch_mlp.up_proj.bits == 4


def test_fp8_of_an_original_is_read(tmp_path: Path) -> None:
    model, tensors = trunk("deepseek_v3"), stored("deepseek_v3")
    name = f"model.layers.{head_models.LAYERS}.self_attn.o_proj.weight"
    codes = mx.to_fp8(tensors[name])
    values = mx.from_fp8(codes, mx.bfloat16) * 2.0
    tensors |= {name: codes, f"{name}_scale_inv": mx.array([[2.0]])}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, tensors, quantization_config=settings)
    with_dtype(tmp_path / "model.safetensors", name, "F8_E4M3")

    head = load_heads(tmp_path, model, bits=None)

    assert mx.array_equal(head.block.layers[0].self_attn.o_proj.weight, values)


def test_files_without_a_head_are_not_checked(tmp_path: Path) -> None:
    """Such as adapters in a dtype that is not known: `load` does not read them."""
    write(tmp_path, stored("mimo"))
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"a": mx.zeros(8)})
    with_dtype(tmp_path / "other.safetensors", "a", "F4")
    load_heads(tmp_path, trunk("mimo"))


def test_only_the_files_of_a_head_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, asked = stored("glm4_moe"), []
    names = sorted(tensors)
    files = {"model-1.safetensors": ["model.norm.weight"], "model-*.safetensors": names}
    index = {name: file for file, own in files.items() for name in own}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        write(tmp_path, tensors)
        (tmp_path / "model.safetensors").rename(tmp_path / "model-*.safetensors")
        text = json.dumps({"weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
        return str(tmp_path)

    hub = ModuleType("huggingface_hub")
    vars(hub)["snapshot_download"] = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    load_heads("zai-org/GLM-4.5-Air", trunk("glm4_moe"))
    assert asked[1:] == [("zai-org/GLM-4.5-Air", ["model-[*].safetensors"])]
    del index["model.layers.2.eh_proj.weight"]
    with pytest.raises(ValueError, match="no head: looked for"):
        load_heads("zai-org/GLM-4.5-Air", trunk("glm4_moe"))
    (tmp_path / "model-*.safetensors").rename(tmp_path / "mtp.safetensors")
    load_heads("zai-org/GLM-4.5-Air", trunk("glm4_moe"))  # as `convert` leaves it
    assert len(asked) == 4


def mixed(tensors: Tensors) -> Tensors:
    name = "mtp.layers.0.input_layernorm.weight"
    return tensors | {name: tensors[name] + 1}


def surplus(tensors: Tensors) -> Tensors:
    return {**tensors, "model.mtp_layers.0.more.weight": mx.zeros(4)}


@pytest.mark.parametrize(
    ("family", "change", "options", "said"),
    [
        ("qwen3_5", lambda _: {"a": mx.zeros(1)}, {}, "no head: looked for.*-MTP-"),
        ("qwen3_5", mixed, {}, "some are stored as 1 \\+ w"),
        ("qwen3_5", dict, {"bits": 7}, "bits=7, expected None or one of"),
        ("glm4_moe", lambda _: stored("qwen3_5"), {}, "no head: looked for"),
        ("mimo", surplus, {}, "layers.0.more.weight.* expected no such tensor"),
    ],
)
def test_what_is_no_head_of_the_model_is_refused(
    family: str,
    change: Callable[[Tensors], Tensors],
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
) -> None:
    write(tmp_path, change(stored(family)))
    with pytest.raises(ValueError, match=said):
        load_heads(tmp_path, trunk(family), **options)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("longcat_flash", "layer is of another kind"),
        ("minimax", "none were published"),
        ("llama", "expected one of"),
    ],
)
def test_models_without_heads_are_refused_with_the_reason(
    module: str, said: str
) -> None:
    own = type("Model", (), {"__module__": f"mlx_lm.models.{module}"})()
    with pytest.raises(ValueError, match=said):
        load_heads("nowhere", own)
    with pytest.raises(ValueError, match="path='nowhere', expected a folder"):
        load_heads("nowhere", trunk("mimo"))
    with pytest.raises(ValueError, match="path='auto' needs a model"):
        load_heads("auto", trunk("mimo"))


@pytest.mark.parametrize("family", ["qwen3_next", "bailing_moe", "qwen3_5"])
def test_a_folder_with_a_head_loads_and_its_conversion_keeps_the_head(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In MLX's format: mlx-lm refuses the first two, as long as the head is there."""
    tensors, source = stored(family), tmp_path / "source"
    weights = dict(nn.utils.tree_flatten(trunk(family).parameters()))
    write(source, weights | tensors, **head_models.stored_config(family))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(quantized_folder.MODEL / name, source / name)
    refused = pytest.raises(ValueError, match="parameters not in model")
    with refused if family != "qwen3_5" else nullcontext():
        mlx_lm.utils.load_model(source)

    model, _ = mlx_marlin.load(source)
    said = capsys.readouterr().err
    expected = logits(load_heads("auto", model, bits=None))
    [*convert(open_source(source), tmp_path / "result", layout="marlin")]
    quantization = Quantization(bits=8)
    result = tmp_path / "quantized"
    rows = convert(open_source(source), result, layout="mlx", quantization=quantization)
    assert not any("mtp" in row.name for row in rows)

    assert said == f"mlx_marlin: {source} has a head, which drafts: load_heads({ASKED}"
    mlx_lm.utils.load_model(result)
    for folder in (tmp_path / "result", result):
        assert mx.array_equal(logits(load_heads(folder, model, bits=None)), expected)


ASKED = "'auto', model)\n"
