"""Writes checkpoints with the packages that define their formats.

    .venv/peers/bin/python write_checkpoints.py FOLDER

This runs where PyTorch and the packages are installed (`make test-peers`), and imports
nothing of mlx_marlin. FOLDER/PACKAGE/CASE is a checkpoint; its file `expected` is in
the safetensors format too and holds the weight [n, k] as the package decodes it.
FOLDER/zero_points.json has what the packages make of GPTQ's zero points.
"""

import importlib
import importlib.util
import itertools
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYER = "model.layers.0.mlp.up_proj"
N, K = 64, 384
GPTQ_BITS = (2, 3, 4, 8)

# Its C++ extension would be compiled first.
os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"


def imported(name: str, *bare: str, **attributes: object) -> Any:
    """Imports a module without running the `__init__` of the packages `bare`.

    Those import every kernel and model of the package, which fails without a GPU or
    with other versions of transformers.
    """
    for package in bare:
        if package in sys.modules:
            continue
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        module = types.ModuleType(package)
        module.__path__ = [*(spec.submodule_search_locations or ())]
        module.__dict__.update(attributes)
        sys.modules[package] = module
    return importlib.import_module(name)


def auto_gptq(variant: str) -> Any:
    folders = ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    return imported(f"{folders[-1]}.qlinear_{variant}", *folders)


def gptqmodel(name: str) -> Any:
    folders = ("gptqmodel", "gptqmodel.models")
    return imported(f"gptqmodel.{name}", *folders, DEBUG_ON=False)


def awq_gemm() -> Any:
    folders = ("awq", "awq.modules", "awq.modules.linear")
    return imported("awq.modules.linear.gemm", *folders)


@dataclass
class Drawn:
    """A weight of integers: values, scales and zero points [n, groups], `g_idx`."""

    linear: torch.nn.Linear
    scales: torch.Tensor
    zeros: torch.Tensor
    group_of_column: torch.Tensor


def drawn(
    bits: int, group: int, symmetric: bool, act_order: bool = False, least_zero: int = 0
) -> Drawn:
    groups = K // group
    codes = torch.randint(0, 2**bits, (N, K))
    scales = torch.empty(N, groups).uniform_(0.01, 0.1).half().float()
    zeros = torch.randint(least_zero, 2**bits, (N, groups)).float()
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    columns = torch.arange(K, dtype=torch.int32) // group
    if act_order:
        columns = columns[torch.randperm(K)]
    own = columns.long()
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = (codes - zeros[:, own]) * scales[:, own]
    return Drawn(linear, scales, zeros, columns)


def save(
    folder: Path,
    settings: dict[str, Any],
    arrays: dict[str, torch.Tensor],
    expected: torch.Tensor,
) -> None:
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"{LAYER}.{part}": a.contiguous() for part, a in arrays.items()}
    save_file(named, folder / "model.safetensors")
    save_file({"weight": expected.contiguous()}, folder / "expected")


def parts(module: torch.nn.Module, *names: str) -> dict[str, torch.Tensor]:
    return {name: getattr(module, name) for name in names}


def gptq_cases() -> Iterator[tuple[str, int, int, bool, bool]]:
    grid = (GPTQ_BITS, (32, 128, K), (False, True), (False, True))
    for bits, group, symmetric, act_order in itertools.product(*grid):
        name = f"{bits}-{group}-{symmetric}-{act_order}"
        yield name, bits, group, symmetric, act_order


def write_auto_gptq(folder: Path) -> None:
    """Version 1; zero points from 1, because it cannot store 0."""
    kernel = auto_gptq("cuda").QuantLinear
    for name, bits, group, symmetric, act_order in gptq_cases():
        weight = drawn(bits, group, symmetric, act_order, least_zero=1)
        module = kernel(bits, group, K, N, bias=False, weight_dtype=torch.float16)
        weight.linear.half()
        module.pack(weight.linear, weight.scales, weight.zeros, weight.group_of_column)
        expected = module(torch.eye(K, dtype=torch.float16)).T
        settings = {"quant_method": "gptq", "bits": bits, "sym": symmetric}
        arrays = parts(module, "qweight", "qzeros", "scales", "g_idx")
        save(folder / name, settings, arrays, expected)


def write_gptqmodel(folder: Path) -> None:
    """Versions 1 and 2, zero points of 0 in both."""
    kernel = gptqmodel("nn_modules.qlinear.torch").TorchLinear
    to_version_1 = gptqmodel("utils.model").convert_gptq_v2_to_v1_format_module
    for name, bits, group, symmetric, act_order in gptq_cases():
        weight = drawn(bits, group, symmetric, act_order)
        module = kernel(bits, group, symmetric, act_order, K, N, bias=False)
        module.pack_block(
            weight.linear, weight.scales, weight.zeros, weight.group_of_column
        )
        module.eval()
        expected = module.dequantize_weight().T
        for version in ("gptq_v2", "gptq"):
            if version == "gptq":
                to_version_1(module, types.SimpleNamespace(bits=bits, pack_dtype=None))
            settings = {
                "quant_method": "gptq",
                "bits": bits,
                "sym": symmetric,
                "checkpoint_format": version,
                "meta": {"quantizer": ["gptqmodel:7.7.0"]},
            }
            arrays = parts(module, "qweight", "qzeros", "scales", "g_idx")
            save(folder / f"{name}-{version}", settings, arrays, expected)


def write_awq(folder: Path) -> None:
    gemm = awq_gemm()
    for group, symmetric in itertools.product((32, 64, 128, K), (False, True)):
        weight = drawn(4, group, symmetric)
        module = gemm.WQLinear_GEMM.from_linear(
            weight.linear,
            4,
            group,
            scales=weight.scales.T.contiguous(),
            zeros=weight.zeros.T.contiguous(),
        )
        arrays = parts(module, "qweight", "qzeros", "scales")
        expected = gemm.dequantize_gemm(*arrays_of(arrays), 4, group).T
        settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
        save(folder / f"{group}-{symmetric}", settings, arrays, expected)


def arrays_of(arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(arrays[name] for name in ("qweight", "qzeros", "scales"))


def compressed_settings(scheme: Any, format: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }


def write_pack_quantized(folder: Path) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    grid = (range(2, 9), (32, 128, K), (False, True), dtypes)
    for bits, group, symmetric, dtype in itertools.product(*grid):
        weight = drawn(bits, group, symmetric)
        arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        arguments |= {"strategy": "channel"} if group == K else {"group_size": group}
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        state = {
            "weight": weight.linear.weight.data.to(dtype),
            "weight_scale": weight.scales.to(dtype),
            # The package counts from -2^(bits - 1).
            "weight_zero_point": (weight.zeros - 2 ** (bits - 1)).to(torch.int8),
        }
        arrays = PackedQuantizationCompressor.compress(state, scheme)
        expected = PackedQuantizationCompressor.decompress(arrays, scheme)["weight"]
        name = f"{bits}-{group}-{symmetric}-{str(dtype).removeprefix('torch.')}"
        settings = compressed_settings(scheme, "pack-quantized")
        save(folder / name, settings, arrays, expected)


def write_nvfp4(folder: Path) -> None:
    """Global scales that are 2688 divided by a power of 2, and others."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    arguments = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    for divisor in (2688.0, 672.0, 1000.0, 12345.678):
        scales = torch.empty(N, K // 16).uniform_(1, 448).to(torch.float8_e4m3fn)
        state = {
            "weight": torch.randn(N, K) * 448 / divisor,
            "weight_scale": scales.float(),
            "weight_global_scale": torch.tensor([divisor]),
        }
        arrays = NVFP4PackedCompressor.compress(state, scheme)
        packed = arrays["weight_packed"]
        # `decompress` rounds to bfloat16.
        expected = dequantize(
            x_q=unpack_fp4_from_uint8(packed, N, K, dtype=torch.float32),
            scale=arrays["weight_scale"].float(),
            args=scheme.weights,
            global_scale=arrays["weight_global_scale"],
            dtype=torch.float32,
        )
        settings = compressed_settings(scheme, "nvfp4-pack-quantized")
        save(folder / f"{divisor}", settings, arrays, expected)


def write_zero_points(file: Path) -> None:
    """How zero points are read of which one, at 2, is stored as 2^bits - 1.

    All others are stored as 0. Codes are 0 and scales 1, so that a weight is minus its
    zero point.
    """
    converted = gptqmodel("utils.model").convert_gptq_v1_to_v2_format_module
    decoded = gptqmodel("utils.model_dequant")
    read: dict[str, dict[int, list[int]]] = {
        name: {} for name in ("cuda", "cuda_old", "TorchLinear", "model_dequant")
    }
    for bits in GPTQ_BITS:
        stored = torch.zeros(1, 32, dtype=torch.int32)
        stored[0, 2] = 2**bits - 1
        words = decoded.pack_cols(stored, bits, pack_dtype=torch.int32)
        for variant in ("cuda", "cuda_old"):
            kernel = auto_gptq(variant).QuantLinear
            module = kernel(bits, 32, 32, 32, bias=False, weight_dtype=torch.float32)
            read[variant][bits] = zeros_of(module, words)
        kernel = gptqmodel("nn_modules.qlinear.torch").TorchLinear
        module = kernel(bits, 32, False, False, 32, 32, bias=False).eval()
        module.qzeros.data = words.clone()
        converted(module, bits, torch.int32)
        module.scales.data.fill_(1)
        read["TorchLinear"][bits] = integers(-module.dequantize_weight()[0])
        shifted = decoded._correct_gptq_v1_qzeros(words, bits)
        read["model_dequant"][bits] = integers(decoded.unpack_cols(shifted, bits)[0])
    file.write_text(json.dumps(read))


def zeros_of(module: Any, words: torch.Tensor) -> list[int]:
    module.qzeros.data = words.clone()
    module.scales.data.fill_(1)
    return integers(-module(torch.eye(32))[0])


def integers(values: torch.Tensor) -> list[int]:
    return [int(value) for value in values]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    target = Path(sys.argv[1])
    write_zero_points(target / "zero_points.json")
    write_auto_gptq(target / "auto_gptq")
    write_gptqmodel(target / "gptqmodel")
    write_awq(target / "autoawq")
    write_pack_quantized(target / "pack-quantized")
    write_nvfp4(target / "nvfp4-pack-quantized")
