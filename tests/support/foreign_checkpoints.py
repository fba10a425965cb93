"""Writes checkpoints of foreign formats, from their documentation, with NumPy alone.

A weight is w[n, k] = scales[n, group of k] * (codes[n, k] - zeros[n, group of k]).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass
class IntegerWeight:
    """Codes [n, k], scales and zero points [n, groups], the group of each column."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    bits: int
    groups_of_columns: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The weight in float64."""
        columns = self.groups_of_columns
        zeros = self.zeros[:, columns].astype(np.float64)
        return self.scales[:, columns].astype(np.float64) * (self.codes - zeros)


@dataclass
class Folder:
    """What a checkpoint is written from."""

    config: dict
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path, file: str = "model.safetensors") -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        arrays = {name: np.array(a, order="C") for name, a in self.arrays.items()}
        save_file(arrays, path / file)
        return path


def drawn_weight(
    rng: np.random.Generator,
    n: int,
    k: int,
    group_size: int,
    bits: int,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    least_zero: int = 0,
) -> IntegerWeight:
    groups = k // group_size
    columns = np.arange(k, dtype=np.int32) // group_size
    zeros = rng.integers(least_zero, 2**bits, (n, groups))
    return IntegerWeight(
        codes=rng.integers(0, 2**bits, (n, k)),
        scales=(
            rng.uniform(0.01, 0.1, (n, groups)) * rng.choice([-1, 1], (n, groups))
        ).astype(np.float16),
        zeros=np.full((n, groups), 2 ** (bits - 1)) if symmetric else zeros,
        bits=bits,
        groups_of_columns=rng.permutation(columns) if act_order else columns,
    )


def bit_stream(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last axis into int32 words, low bits first; the last word is padded."""
    one_by_one = (values[..., None] >> np.arange(bits)) & 1
    flat = one_by_one.reshape(*values.shape[:-1], -1).astype(np.uint8)
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    octets = np.packbits(flat, axis=-1, bitorder="little")
    return octets.view(np.int32)


def padded_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last axis into int32 words of 32 // bits values, low bits first."""
    in_word = 32 // bits
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % in_word)]
    runs = np.pad(values, padding).reshape(*values.shape[:-1], -1, in_word)
    words = (runs.astype(np.uint64) << np.arange(in_word, dtype=np.uint64) * bits).sum(
        -1
    )
    return words.astype(np.uint32).view(np.int32)


def gptq_arrays(layer: str, weight: IntegerWeight, version: int) -> dict:
    """The arrays of a GPTQ layer; version 1 stores zero points minus one."""
    zeros = weight.zeros.T - (1 if version == 1 else 0)
    return {
        f"{layer}.qweight": bit_stream(weight.codes, weight.bits).T,
        f"{layer}.qzeros": bit_stream(zeros, weight.bits),
        f"{layer}.scales": weight.scales.T,
        f"{layer}.g_idx": weight.groups_of_columns.astype(np.int32),
    }


def awq_arrays(layer: str, weight: IntegerWeight) -> dict:
    """The arrays of an AWQ layer in the GEMM layout."""

    def nibbles(values: np.ndarray) -> np.ndarray:
        eight = values.reshape(len(values), -1, 8).astype(np.uint32)
        words = np.zeros(eight.shape[:-1], np.uint32)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= eight[..., column] << np.uint32(4 * nibble)
        return words.view(np.int32)

    return {
        f"{layer}.qweight": nibbles(weight.codes.T),
        f"{layer}.qzeros": nibbles(weight.zeros.T),
        f"{layer}.scales": weight.scales.T,
    }


def compressed_arrays(
    layer: str, weight: IntegerWeight, *, symmetric: bool, version: str = "0.18"
) -> dict:
    """The arrays of a compressed-tensors layer, pack-quantized."""
    words = bit_stream if version == "0.18" else padded_words
    arrays = {
        f"{layer}.weight_packed": words(weight.codes, weight.bits),
        f"{layer}.weight_scale": weight.scales,
        f"{layer}.weight_shape": np.array(weight.codes.shape, np.int64),
        f"{layer}.weight_g_idx": weight.groups_of_columns.astype(np.int32),
    }
    if not symmetric:
        zeros = words(weight.zeros.T, weight.bits).T
        if version == "0.9":
            zeros = (weight.zeros - 2 ** (weight.bits - 1)).astype(np.int8)
        arrays[f"{layer}.weight_zero_point"] = zeros
    return arrays


def compressed_config(bits: int, *, symmetric: bool = False, **said: object) -> dict:
    """The config of a compressed-tensors checkpoint, pack-quantized."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "group_size": 64,
        "strategy": "group",
        "block_structure": None,
        "dynamic": False,
        "actorder": "group",
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return _of_groups("pack-quantized", weights | said)


def nvfp4_config() -> dict:
    """The config of a compressed-tensors checkpoint, nvfp4-pack-quantized."""
    return _of_floats("nvfp4", 16, "tensor_group", "torch.float8_e4m3fn")


def mxfp4_config() -> dict:
    """The config of a compressed-tensors checkpoint, mxfp4-pack-quantized."""
    return _of_floats("mxfp4", 32, "group", "torch.uint8")


def _of_floats(name: str, group_size: int, strategy: str, scale_dtype: str) -> dict:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": group_size,
        "strategy": strategy,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": scale_dtype,
        "zp_dtype": None,
    }
    return _of_groups(f"{name}-pack-quantized", weights)


def _of_groups(format: str, weights: dict) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": format,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }
    return {"model_type": "llama", "quantization_config": quantization}


def gptq_config(bits: int, version: int, **said: object) -> dict:
    """The config of a GPTQ checkpoint."""
    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 64,
        "sym": False,
        "desc_act": True,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": False,
        "pack_dtype": "int32",
        "true_sequential": True,
        "damp_percent": 0.01,
    }
    return {"model_type": "llama", "quantization_config": quantization | said}


def awq_config(**said: object) -> dict:
    """The config of an AWQ checkpoint."""
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "GEMM",
        "modules_to_not_convert": None,
    }
    return {"model_type": "llama", "quantization_config": quantization | said}
