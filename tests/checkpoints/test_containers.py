"""Weights of AutoRound, and of 4-bit floats in every container, are read exactly."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_oss
from safetensors.numpy import save_file

from mlx_marlin.checkpoints.reading import tensors
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model, needs_import
from support import foreign_checkpoints as foreign
from support import oracles

LAYER = "model.layers.0.mlp.up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes by the lower three bits; the highest one is the sign."""


def e2m1(octets: np.ndarray) -> np.ndarray:
    """The numbers of nibbles, low ones first, in float64."""
    nibbles = np.stack([octets & 15, octets >> 4], -1)
    numbers = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
    return numbers.reshape(*octets.shape[:-1], -1)


def drawn(seed: int, *shape: int, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape, np.uint8)


def nvfp4_values(codes: np.ndarray, scales: np.ndarray, factor: float) -> np.ndarray:
    return e2m1(codes) * np.repeat(e4m3(scales), 16, axis=-1) * factor


def e4m3(octets: np.ndarray) -> np.ndarray:
    """The numbers of bytes without a sign: 4 bits of exponent, 3 of a fraction."""
    exponent, fraction = (octets >> 3).astype(np.float64), octets & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)


def with_dtype(file: Path, name: str, dtype: str) -> None:
    """Changes the dtype of an array, which NumPy does not have, in a file's header."""
    octets = file.read_bytes()
    end = 8 + int.from_bytes(octets[:8], "little")
    header = json.loads(octets[8:end])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + octets[end:])


def mxfp4_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    numbers = 2.0 ** (scales.astype(np.float64) - 127)
    return e2m1(codes) * np.repeat(numbers, 32, axis=-1)


def read(path: Path) -> Any:
    (tensor,) = [each for each in tensors(path) if each.name == f"{LAYER}.weight"]
    return tensor.read()


def modelopt(settings: dict[str, Any], *, apart: bool, path: Path) -> np.ndarray:
    """Writes a folder as ModelOpt does; returns the weight."""
    codes, scales = drawn(0, 32, 64), drawn(1, 32, 8, high=0x7F)
    factor = np.float32(2**-9)
    config: dict[str, Any] = {"model_type": "llama"}
    if not apart:
        config["quantization_config"] = {"quant_method": "modelopt", **settings}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if apart:
        own = {"producer": {"name": "modelopt"}, "quantization": settings}
        (path / "hf_quant_config.json").write_text(json.dumps(own))
    arrays = {
        f"{LAYER}.weight": codes,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_scale_2": np.array(factor),
        f"{LAYER}.input_scale": np.array(np.float32(3)),
        "model.layers.0.self_attn.k_proj.k_scale": np.ones(1, np.float32),
        "model.norm.weight": np.ones(64, np.float16),
    }
    save_file(arrays, path / "model.safetensors")
    with_dtype(path / "model.safetensors", f"{LAYER}.weight_scale", "F8_E4M3")
    return nvfp4_values(codes, scales, float(factor))


@pytest.mark.parametrize("apart", [False, True])
def test_nvfp4_of_modelopt(tmp_path: Path, apart: bool) -> None:
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    exact = modelopt(settings, apart=apart, path=tmp_path / "model")
    weight = read(tmp_path / "model")
    assert weight.mode == "nvfp4"
    np.testing.assert_array_equal(np.array(weight.decoded(), np.float64), exact)
    assert needs_import(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo='FP8', expected one of"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo='MIXED_PRECISION'"),
        ({"group_size": 32}, "group_size=32, expected 16"),
        ({"pre_quant_scale": True}, "pre_quant_scale=True"),
    ],
)
def test_other_formats_of_modelopt_are_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    settings = {"quant_algo": "NVFP4", "group_size": 16} | change
    modelopt(settings, apart=False, path=tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "model")


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    codes, scales = drawn(0, 32, 64), drawn(1, 32, 4, low=100, high=150)
    config = foreign.nvfp4_config()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["format"] = config["quantization_config"]["format"] = "mxfp4-pack-quantized"
    group["weights"] |= {"group_size": 32, "strategy": "group"}
    group["weights"]["scale_dtype"] = "torch.uint8"
    arrays = {f"{LAYER}.weight_packed": codes, f"{LAYER}.weight_scale": scales}
    weight = read(foreign.Folder(config, arrays).write(tmp_path))
    assert weight.mode == "mxfp4"
    found = np.array(weight.decoded(), np.float64)
    np.testing.assert_array_equal(found, mxfp4_values(codes, scales))


@pytest.mark.parametrize("columns", [64, 63])
@pytest.mark.parametrize("groups", [4, 8])
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, columns: int, groups: int
) -> None:
    if (columns, groups) == (64, 4):
        groups = 5
    config = foreign.nvfp4_config()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["format"] = "mxfp4-pack-quantized"
    group["weights"] |= {"group_size": 32, "strategy": "group"}
    arrays = {
        f"{LAYER}.weight_packed": drawn(0, 32, columns),
        f"{LAYER}.weight_scale": drawn(1, 32, groups, high=200),
    }
    path = foreign.Folder(config, arrays).write(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj\.weight'.*expected"):
        read(path)


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "hidden_size": 128,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "rope_theta": 10000,
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_gpt_oss_as_it_was_published(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(GPT_OSS))
    exact, stored = {}, {}
    for name, array in tree_flatten(model.parameters()):
        if ".experts." not in name:
            values = rng.normal(0, 0.2, array.shape).astype(np.float16)
            exact[name] = stored[name] = values
    for layer in range(2):
        start = f"model.layers.{layer}.mlp.experts"
        for seed, (name, n, k) in enumerate(
            [("gate_up_proj", 128, 128), ("down_proj", 128, 64)]
        ):
            codes = drawn(10 * layer + seed, 4, n, k // 2)
            scales = drawn(layer, 4, n, k // 32, low=120, high=125)
            bias = rng.normal(size=(4, n)).astype(np.float16)
            values = mxfp4_values(codes, scales)
            stored[f"{start}.{name}_blocks"] = codes.reshape(4, n, k // 32, 16)
            stored[f"{start}.{name}_scales"] = scales
            stored[f"{start}.{name}_bias"] = bias
            # Rows of gate and up alternate.
            parts = {"down_proj": (values, bias)}
            if name == "gate_up_proj":
                own = ("gate_proj", "up_proj")
                parts = {p: (values[:, i::2], bias[:, i::2]) for i, p in enumerate(own)}
            for part, (weight, own_bias) in parts.items():
                exact[f"{start}.{part}.weight"] = weight
                exact[f"{start}.{part}.bias"] = own_bias
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    foreign.Folder(config, stored).write(tmp_path / "source")
    model.load_weights(
        [(name, mx.array(value.astype(np.float32))) for name, value in exact.items()]
    )
    tokens = mx.array([[1, 2, 3, 4, 5]])
    expected = np.array(model(tokens), np.float64)

    [*convert(open_source(tmp_path / "source"), tmp_path / "result")]

    for folder in ("source", "result"):
        loaded = load_model(open_source(tmp_path / folder))
        assert oracles.error(loaded(tokens), expected) < 5e-3


AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 64,
    "data_type": "int",
    "autoround_version": "0.14.2",
    "iters": 0,
    "model_free": True,
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}


@pytest.mark.parametrize(
    ("packing", "symmetric", "bits"),
    [
        ("auto_round:auto_gptq", True, 4),
        ("auto_round:auto_gptq", False, 4),
        ("auto_round:gptqmodel", True, 4),
        ("auto_round:auto_gptq", True, 8),
        ("auto_round:auto_awq", False, 4),
    ],
)
def test_folders_of_autoround(
    tmp_path: Path, packing: str, symmetric: bool, bits: int
) -> None:
    weight = foreign.drawn_weight(
        np.random.default_rng(0), 32, 128, 64, bits, symmetric=symmetric, least_zero=1
    )
    arrays = foreign.gptq_arrays(LAYER, weight, 1)
    if packing.endswith("awq"):
        arrays = foreign.awq_arrays(LAYER, weight)
    settings = AUTO_ROUND | {"packing_format": packing, "sym": symmetric}
    if bits != 4:
        extra = {"bits": bits, "sym": symmetric, "data_type": "int"}
        settings = settings | {"extra_config": {LAYER: extra}}
    config = {"model_type": "llama", "quantization_config": settings}
    found = read(foreign.Folder(config, arrays).write(tmp_path))
    assert found.mode == ("symmetric" if symmetric else "zero_point")
    np.testing.assert_array_equal(np.array(found.decoded()), weight.values)
    assert needs_import(tmp_path)


@pytest.mark.parametrize(
    ("packing", "symmetric"),
    [("auto_round:gptqmodel", False), ("auto_round:fp8", True), (None, True)],
)
def test_other_packings_of_autoround_are_refused(
    tmp_path: Path, packing: str | None, symmetric: bool
) -> None:
    settings = AUTO_ROUND | {"packing_format": packing, "sym": symmetric}
    config = {"model_type": "llama", "quantization_config": settings}
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 4)
    arrays = foreign.gptq_arrays(LAYER, weight, 1)
    said = r"config\.json: .*packing_format=.*expected 'auto_round:auto_gptq'"
    with pytest.raises(ValueError, match=said):
        read(foreign.Folder(config, arrays).write(tmp_path))
