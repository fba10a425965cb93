"""GGUF files of tiny models, as llama.cpp's conversion writes them."""

import importlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from mlx.utils import tree_flatten

from mlx_marlin.checkpoints.gguf import Container
from support.gguf_blocks import SIZES, decoded
from support.gguf_cases import (
    CASES,
    HEADS,
    KEY_DIM,
    KV_HEADS,
    VALUE_HEADS,
    Case,
    arguments,
)
from support.gguf_files import Written, plain_bytes, write_gguf

_PERMUTED = ("llama", "mistral3")
_NORMS_PLUS_ONE = ("gemma2", "gemma3")


def build(config: dict[str, Any]) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def random_model(case: Case) -> nn.Module:
    model = build(arguments(case))
    if case.model_type == "gemma3_text":
        model.sanitize({})  # drops the output, which is tied
    random = np.random.default_rng(0)
    drawn = [
        (name, mx.array(random.normal(0, 0.2, array.shape).astype(np.float16)))
        for name, array in tree_flatten(model.parameters())
    ]
    return model.load_weights(
        [(name, array.astype(mx.float32)) for name, array in drawn]
    )


def written_model(case: Case, model: nn.Module) -> list[Written]:
    """Returns the tensors of a model, F32, as llama.cpp's conversion leaves them."""
    names = _names_of(case.architecture, case.layers)
    tensors = []
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    if case.architecture == "qwen3next":
        parameters = _with_joined_gates(parameters)
    if case.architecture == "gemma4":
        parameters = _with_fused_experts(parameters)
        tensors.append(_proportional())
    for name, array in parameters.items():
        path = name.replace("switch_mlp", "experts").removeprefix("language_model.")
        path = path.replace("correction_bias", "correction.bias")
        path = path.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
        if name.endswith("router.scale"):
            stored = f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            stored = f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        else:
            stored = _stored_name(names, case, path)
        values = _converted(case, name, np.array(array.astype(mx.float32)))
        tensors.append(Written(stored, "F32", values.shape, plain_bytes("F32", values)))
    return tensors


def opened(
    folder: Path, name: str, changes: dict[str, Any], *more: Written, without: str = ""
) -> Container:
    """Writes one of `CASES` to t.gguf with other metadata; None takes a value away."""
    case = CASES[name]
    changed = (case.metadata | changes).items()
    metadata = {key: value for key, value in changed if value is not None}
    tensors = written_model(case, random_model(case))
    kept = [tensor for tensor in tensors if tensor.name != without]
    return Container(write_gguf(folder / "t.gguf", metadata, [*kept, *more]))


def _names_of(architecture: str, layers: int) -> TensorNameMap:
    (kind,) = (each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == architecture)
    return get_tensor_name_map(kind, layers)


def _stored_name(names: TensorNameMap, case: Case, path: str) -> str:
    if case.model_type == "mixtral":
        for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            path = path.replace(f"experts.{ours}_proj", f"experts.{theirs}")
    stored = names.get_name(path, try_suffixes=(".weight", ".bias"))
    assert stored is not None, f"no name for {path}"
    if not stored.endswith((".weight", ".bias", ".ssm_a")):
        stored += ".weight"
    return stored


def write_twice(
    folder: Path,
    metadata: dict[str, Any],
    tensors: Iterable[Written],
    kind: str,
    blocks: Callable[[np.ndarray], np.ndarray],
) -> tuple[Path, Path, set[str]]:
    """Writes a model with weights of a type, and one with the numbers that they are."""
    stored, exact, changed = [], [], set()
    for tensor in tensors:
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        is_small = any(part in tensor.name for part in ("norm", "conv", "inp", "bias"))
        own, plain = tensor, tensor
        if not is_small and values.ndim > 1 and values.shape[-1] % SIZES[kind][0] == 0:
            octets = blocks(values)
            own = tensor._replace(type=kind, data=octets.tobytes())
            plain = tensor._replace(data=decoded(kind, octets).tobytes())
            changed.add(tensor.name)
        elif "_exps" in tensor.name:  # MLX multiplies experts on the CPU in float32
            own = plain = tensor._replace(data=(values * np.float32(1.0001)).tobytes())
        stored.append(own)
        exact.append(plain)
    return (
        write_gguf(folder / "stored.gguf", metadata, stored),
        write_gguf(folder / "exact.gguf", metadata, exact),
        changed,
    )


def with_fused_gates(tensors: Iterable[Written]) -> list[Written]:
    """Joins gates and ups of experts in one tensor, as newer files have them."""
    found = {tensor.name: tensor for tensor in tensors}
    for gate in [name for name in found if name.endswith("ffn_gate_exps.weight")]:
        pair = found.pop(gate), found.pop(gate.replace("gate", "up"))
        halves = [np.frombuffer(t.data, np.float32).reshape(t.shape) for t in pair]
        both = np.concatenate(halves, axis=1)
        name = gate.replace("gate", "gate_up")
        found[name] = Written(name, "F32", both.shape, both.tobytes())
    return [*found.values()]


def write_llama(
    path: Path, config: dict[str, Any], weights: dict[str, tuple[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Writes a llama of numbers (F32) or blocks by name; returns it in float64."""
    names = _names_of("llama", config["num_hidden_layers"])
    keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    tensors, exact = [], {}
    for parameter, (kind, octets) in weights.items():
        layer = parameter.removesuffix(".weight")
        values = octets if kind == "F32" else decoded(kind, octets)
        exact[parameter] = values.astype(np.float64)
        key = keys.get(layer.rpartition(".")[2])
        rows = octets if key is None else permuted(octets, config[key])
        stored = f"{names.get_name(layer)}.weight"
        tensors.append(Written(stored, kind, values.shape, rows.tobytes()))
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    metadata = {f"llama.{name}": value for name, value in sizes.items()}
    write_gguf(path, {"general.architecture": "llama", **metadata}, tensors)
    return exact


def _with_fused_experts(parameters: dict[str, mx.array]) -> dict[str, mx.array]:
    """Joins gates and ups of experts, as Gemma 4 has them."""
    fused = {}
    for name, array in parameters.items():
        if name.endswith("switch_glu.gate_proj.weight"):
            up = parameters[name.replace("gate_proj", "up_proj")]
            both = name.replace("switch_glu.gate_proj.weight", "gate_up_proj")
            fused[both] = mx.concatenate([array, up], axis=1)
        elif not name.endswith("switch_glu.up_proj.weight"):
            fused[name.replace("switch_glu.", "")] = array
    return fused


def _proportional() -> Written:
    """Returns the factors of a head of 32, of which a quarter is rotated."""
    factors = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    return Written("rope_freqs.weight", "F32", factors.shape, factors.tobytes())


def _converted(case: Case, name: str, values: np.ndarray) -> np.ndarray:
    if "conv" in name and values.ndim == 3:
        values = values[..., 0]
    if case.architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        values = _tiled(name, values)
    if name.endswith("A_log"):
        return -np.exp(values)
    if case.architecture in _PERMUTED and ".self_attn.q_proj." in name:
        return permuted(values, HEADS)
    if case.architecture in _PERMUTED and ".self_attn.k_proj." in name:
        return permuted(values, KV_HEADS)
    if case.architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return values + np.float32(1)
    if "shared_expert_gate" in name:
        return values[0]
    return values


def _with_joined_gates(parameters: dict[str, mx.array]) -> dict[str, mx.array]:
    """Joins the betas and alphas of each head of keys, as Qwen3-Next has them."""
    joined = {}
    for name, array in parameters.items():
        if name.endswith("in_proj_b.weight"):
            alphas = parameters[name.replace("in_proj_b", "in_proj_a")]
            halves = [mx.split(each, KV_HEADS) for each in (array, alphas)]
            rows = [each[head] for head in range(KV_HEADS) for each in halves]
            joined[name.replace("in_proj_b", "in_proj_ba")] = mx.concatenate(rows)
        elif not name.endswith("in_proj_a.weight"):
            joined[name] = array
    return joined


def _tiled(name: str, values: np.ndarray) -> np.ndarray:
    """Returns heads of values in ggml's order: one for each head of keys, and so on."""
    if name.endswith("out_proj.weight"):
        return _tiled("z", values.T).T
    if name.endswith("norm.weight"):
        return values
    first = 2 * KV_HEADS * KEY_DIM if "qkv" in name or "conv1d" in name else 0
    heads = np.split(values[first:], VALUE_HEADS)
    each = VALUE_HEADS // KV_HEADS
    order = [key * each + own for own in range(each) for key in range(KV_HEADS)]
    return np.concatenate([values[:first], *(heads[head] for head in order)])


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows in the order of llama.cpp's conversion of Llama, row by row."""
    stored = np.empty_like(values)
    rows = len(values) // heads
    for head in range(heads):
        for row in range(rows // 2):
            first, second = head * rows + row, head * rows + row + rows // 2
            stored[head * rows + 2 * row] = values[first]
            stored[head * rows + 2 * row + 1] = values[second]
    return stored


def llama3_factors(factor: float, base: float, width: int) -> Written:
    """Returns what Llama 3 multiplies wavelengths by."""
    factors = []
    for index in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (index / width)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            share = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - share) / factor + share))
    array = np.array(factors, np.float32)
    return Written("rope_freqs.weight", "F32", array.shape, array.tobytes())
