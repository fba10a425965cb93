"""Tiny random models in every container, and mlx-lm's logits with their weights."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType, quants
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support import gguf_models, oracles
from support.configurations import (
    CONFIGURATIONS,
    Arrays,
    drawn_parameters,
    experts_of,
    new_model,
    published,
    settings_of,
)
from support.format_cases import E2M1, E4M3
from support.gguf_cases import CASES
from support.gguf_vocabularies import byte_pairs

TOKENS = mx.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
Weight = tuple[Arrays, np.ndarray]
"""What stands for a matrix in a checkpoint, and its exact values."""


class Container(NamedTuple):
    """A format of the linear layers of a checkpoint."""

    settings: dict[str, Any]
    weight: Callable[[np.random.Generator, str, tuple[int, int]], Weight]


def integers(
    rng: np.random.Generator,
    layer: str,
    shape: tuple[int, int],
    arrays: Callable[..., Arrays],
    *,
    bits: int = 4,
    group_size: int = 64,
    act_order: bool = False,
    **options: Any,
) -> Weight:
    """Draws a matrix of integers; those of as many columns share one act-order."""
    weight = foreign.drawn_weight(rng, *shape, group_size, bits, **options)
    scales = weight.scales * 2.0 ** (5 - bits) / shape[1] ** 0.5
    weight.scales = scales.astype(np.float16)
    if act_order:
        order = np.random.default_rng(shape[1]).permutation(shape[1])
        weight.groups_of_columns = order // group_size
    return arrays(layer, weight), weight.values


def _nvfp4(rng: np.random.Generator, layer: str, shape: tuple[int, int]) -> Weight:
    n, k = shape
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    scales = rng.integers(0x08, 0x18, (n, k // 16), np.uint8)
    factor = np.array(rng.uniform(1, 2), np.float32)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(n, k)
    values = E2M1[nibbles] * np.repeat(E4M3[scales], 16, axis=1) * factor
    arrays = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    arrays["input_scale"] = np.array(1.0, np.float32)
    return {f"{layer}.{name}": array for name, array in arrays.items()}, values


_GPTQ_1 = partial(foreign.gptq_arrays, version=1)
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 64,
    "data_type": "int",
    "sym": True,
    "autoround_version": "0.8.0",
}
_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
CONTAINERS = {
    "GPTQ": Container(
        foreign.gptq_config(4, 1, desc_act=False),
        partial(integers, arrays=_GPTQ_1, least_zero=1),
    ),
    "AWQ": Container(
        foreign.awq_config(), partial(integers, arrays=foreign.awq_arrays)
    ),
    "compressed-tensors": Container(
        foreign.compressed_config(4, symmetric=True),
        partial(
            integers,
            arrays=partial(foreign.compressed_arrays, symmetric=True),
            symmetric=True,
        ),
    ),
    "AutoRound": Container(
        {"quantization_config": _AUTO_ROUND},
        partial(integers, arrays=_GPTQ_1, symmetric=True),
    ),
    "ModelOpt": Container({"quantization_config": _MODELOPT}, _nvfp4),
}
MLX, GGUF = "MLX mixed", "GGUF"
MIXED: list[dict[str, Any] | bool] = [
    {"group_size": 64, "bits": 4, "mode": "affine"},
    {"group_size": 32, "bits": 8, "mode": "affine"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 64, "bits": 6, "mode": "affine"},
    False,
]
"""Formats of layers in MLX's own container."""
IN_GGUF = {
    "Llama-3.1-8B": "llama",
    "Llama-3.2-1B": "llama_tied",
    "Ministral-3-8B": "mistral3",
    "Mixtral-8x7B": "mixtral",
    "Qwen2.5-0.5B": "qwen2",
    "Qwen1.5-MoE-A2.7B": "qwen2moe",
    "Qwen3-8B": "qwen3",
    "Qwen3-30B-A3B": "qwen3moe",
    "Qwen3-Next-80B-A3B": "qwen3next",
    "Qwen3.5-9B": "qwen35",
    "Qwen3.5-35B-A3B": "qwen35moe",
    "Gemma-2-9B": "gemma2",
    "Gemma-3-1B": "gemma3",
    "Gemma-4-E2B": "gemma4",
    "Gemma-4-26B-A4B": "gemma4_experts",
    "Phi-4-mini": "phi3",
    "GLM-4-9B": "glm4",
    "GLM-4.5-Air": "glm4moe",
    "LFM2-1.2B": "lfm2",
    "gpt-oss-20b": "gpt-oss",
}
"""Configurations that llama.cpp's conversion has, and their models in GGUF."""
PAIRS = [
    (name, container)
    for name in CONFIGURATIONS
    for container in (*CONTAINERS, MLX, GGUF)
    if container != GGUF or name in IN_GGUF
]
_PLAIN = (
    *("embed", "lm_head", "norm", "conv", "router", "classifier", "indexer"),
    *("per_layer_model_projection", "mtp"),
)
"""Parts of the names of layers that no tool quantizes."""
_ROUTERS = ("gate", "wg", "shared_expert_gate", "x_proj", "dt_proj")


def is_quantized(name: str, array: np.ndarray) -> bool:
    """Returns whether tools quantize a tensor: those of linear layers in blocks."""
    layer, _, part = name.rpartition(".")
    own = layer.rpartition(".")[2]
    fits = array.ndim == 2 and array.shape[0] % 32 == 0 and array.shape[1] % 64 == 0
    is_plain = any(word in layer for word in _PLAIN) or own in _ROUTERS
    return part == "weight" and fits and not is_plain


def write(name: str, container: str, path: Path) -> np.ndarray:
    """Writes a model in a container, and returns mlx-lm's logits with its weights."""
    if container == GGUF:
        return _write_gguf(IN_GGUF[name], path)
    if container == MLX:
        return _write_mlx(name, path)
    return _write_foreign(name, CONTAINERS[container], path)


def _write_foreign(name: str, container: Container, path: Path) -> np.ndarray:
    rng = np.random.default_rng(1)
    weight = partial(container.weight, rng)
    return _logits(write_model(path, settings_of(name), weight, container.settings))


def write_model(
    path: Path,
    config: dict[str, Any],
    weight: Callable[[str, tuple[int, int]], Weight | None],
    said: dict[str, Any],
    *,
    quantizes: Callable[[str, np.ndarray], bool] = is_quantized,
    dtype: type = np.float32,
) -> nn.Module:
    """Writes a model of random weights; returns mlx-lm's of the same in float32."""
    stored: Arrays = {}

    def stored_as(key: str, array: np.ndarray) -> np.ndarray:
        own = None
        if quantizes(key, array):
            own = weight(key.removesuffix(".weight"), array.shape)
        if own is None:
            array = array.astype(dtype)
            own = {key: array}, array
        stored.update(own[0])
        return own[1]

    model = _drawn_model(config, stored_as)
    foreign.Folder(said | config, stored).write(path)
    (path / "tokenizer_config.json").write_text("{}")
    return model


def _drawn_model(
    config: dict[str, Any], stored_as: Callable[[str, np.ndarray], np.ndarray]
) -> nn.Module:
    """Returns mlx-lm's model of a checkpoint with random weights."""
    module, model = config["model_type"], new_model(config)
    exact: Arrays = {}
    for key, array in published(module, drawn_parameters(model)).items():
        names = experts_of(module, key, array)
        if not names:
            exact[key] = stored_as(key, array)
            continue
        pairs = zip(names, array, strict=True)
        matrices = {each: stored_as(each, matrix) for each, matrix in pairs}
        stacked = {key: np.stack([*matrices.values()])}
        exact |= stacked if module in READ_STACKED else matrices
    weights = {key: mx.array(array.astype(np.float32)) for key, array in exact.items()}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights([*weights.items()])
    model.eval()
    return model


READ_STACKED = ("gpt_oss", "llama4", "gemma4_text", "qwen3_5_moe", "qwen3_vl_moe")
"""Modules of mlx-lm that do not stack experts."""


def _write_mlx(name: str, path: Path) -> np.ndarray:
    config = settings_of(name)
    model, plain = (_drawn_model(config, lambda _, array: array) for _ in range(2))
    own = getattr(model, "quant_predicate", None) or (lambda *_: True)
    said: dict[str, Any] = dict(MIXED[0])  # type: ignore[arg-type]

    def chosen(layer: str, module: nn.Module) -> bool | dict[str, Any]:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0
        if not fits or not own(layer, module):
            return False
        said[layer] = MIXED[zlib.crc32(layer.encode()) % len(MIXED)]
        return said[layer]

    nn.quantize(model, class_predicate=chosen)
    path.mkdir()
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    (path / "config.json").write_text(json.dumps(config | {"quantization": said}))
    (path / "tokenizer_config.json").write_text("{}")
    plain.load_weights([*_decoded(model).items()])
    return _logits(plain)


def _decoded(model: nn.Module) -> dict[str, mx.array]:
    """Returns the parameters of a model, with the weights that its codes stand for."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, module in model.named_modules():
        if "scales" in module:
            start = f"{name}." if name else ""
            parts = ("weight", "scales", "biases", "global_scale")
            codes, scales, biases, factor = (
                arrays.pop(start + part, None) for part in parts
            )
            form = module.group_size, module.bits, module.mode
            plain = mx.dequantize(codes, scales, biases, *form, dtype=mx.float32)
            if factor is not None:
                plain *= (factor / 2688).reshape(-1, 1, 1)
            arrays[f"{start}weight"] = plain
    return arrays


def _write_gguf(name: str, path: Path) -> np.ndarray:
    case = CASES[name]
    path.mkdir()
    tensors = gguf_models.written_model(case, gguf_models.random_model(case))

    def blocks(values: np.ndarray) -> np.ndarray:
        return quants.quantize(values, GGMLQuantizationType.Q4_0)

    metadata = case.metadata | byte_pairs("qwen2")
    _, exact, _ = gguf_models.write_twice(path, metadata, tensors, "Q4_0", blocks)
    logits = _logits(load_model(open_source(exact)))
    exact.unlink()
    return logits


def _logits(model: nn.Module) -> np.ndarray:
    for name, module in model.named_modules():
        if (
            isinstance(module, QuantizedSwitchLinear)
            and module.global_scale is not None
        ):
            # MLX multiplies such experts on GPUs alone.
            plain = SwitchLinear(
                module.input_dims, module.output_dims, module.num_experts, bias=False
            )
            plain.weight = _decoded(module)["weight"]
            if "bias" in module:
                plain.bias = module.bias
            model.update_modules(tree_unflatten([(name, plain)]))
    y = model(TOKENS)
    return np.array(y.astype(mx.float32)).astype(np.float64)


STEPS = ("load", "marlin", "mlx")
"""Loading a checkpoint, and what is converted to each layout."""
REFUSED = "refused: "
"""Beginning of what is told about a checkpoint that is refused."""


@dataclass
class Checkpoint:
    """A configuration in a container, in a folder."""

    name: str
    container: str
    path: Path

    @cached_property
    def expected(self) -> np.ndarray:
        """mlx-lm's logits with the decoded weights."""
        return write(self.name, self.container, self.path / "source")

    def outcome(self, step: str) -> str:
        """Returns "" if the logits after a step are right, else what is the matter."""
        expected, folder = self.expected, self.path / "source"
        try:
            if step != "load":
                [*convert(open_source(folder), self.path / step, layout=step)]
                folder = self.path / step
            model = load_model(open_source(folder))
        except ValueError as error:
            return REFUSED + str(error).replace(f"{self.path}/", "")
        found = oracles.error(mx.array(_logits(model)), expected)
        # MLX's layout may round biases; models of GGUF files have float16 activations,
        # and so have weights that mlx-lm computes anew when it reads a checkpoint.
        limit = 1e-2 if step == "mlx" or self.container == GGUF else 1e-3
        return "" if found < limit else f"wrong: error {found:.2g}, at most {limit}"
