"""Weights of AutoRound, and of 4-bit floats in every container, are read exactly."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import gpt_oss

from mlx_marlin.checkpoints.reading import tensors
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model, needs_import
from support import foreign_checkpoints as foreign
from support import one_layer, oracles
from support.configurations import EXPERTS, W1_TO_W3, new_model, settings_of
from support.foreign_models import CONFIG
from support.format_cases import E2M1, E4M3, E8M0
from support.one_layer import LAYER, modelopt, mxfp4, nvfp4


def drawn(seed: int, *shape: int, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape, np.uint8)


def exact_of(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the weights of 4-bit floats, two a byte, and the numbers of scales."""
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    size = nibbles.shape[-1] // numbers.shape[-1]
    return E2M1[nibbles] * np.repeat(numbers, size, axis=-1)


def with_dtype(file: Path, name: str, dtype: str) -> None:
    """Changes the dtype of an array, which NumPy does not have, in a file's header."""
    octets = file.read_bytes()
    end = 8 + int.from_bytes(octets[:8], "little")
    header = json.loads(octets[8:end])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + octets[end:])


def read(path: Path) -> Any:
    (tensor,) = [each for each in tensors(path) if each.name == f"{LAYER}.weight"]
    return tensor.read()


@pytest.mark.parametrize("apart", [False, True])
def test_nvfp4_of_modelopt(tmp_path: Path, apart: bool) -> None:
    folder = modelopt(exclude_modules=["lm_head"])
    codes, scales, factor = folder.arrays.values()
    if apart:
        settings = folder.config.pop("quantization_config")
        del settings["quant_method"]
        own = {"producer": {"name": "modelopt"}, "quantization": settings}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    folder.arrays[f"{LAYER}.input_scale"] = np.array(np.float32(3))
    folder.arrays["model.layers.0.self_attn.k_proj.k_scale"] = np.ones(1, np.float32)
    path = folder.write(tmp_path)
    with_dtype(path / "model.safetensors", f"{LAYER}.weight_scale", "F8_E4M3")

    weight = read(path)

    assert weight.mode == "nvfp4"
    found = np.array(weight.decoded(), np.float64)
    np.testing.assert_array_equal(found, exact_of(codes, E4M3[scales] * factor))
    assert needs_import(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo='FP8', expected one of"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {str(i): {"quant_algo": "FP8"} for i in range(99)},
            },
            "quant_algo='MIXED_PRECISION', .*start from the model's plain weights",
        ),
        ({"group_size": 32}, "group_size=32, expected 16"),
        ({"pre_quant_scale": True}, "pre_quant_scale=True"),
    ],
)
def test_other_formats_of_modelopt_are_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(modelopt(**change).write(tmp_path))


@pytest.mark.parametrize("checkpoint", [nvfp4, mxfp4])
def test_4_bit_floats_of_compressed_tensors(
    tmp_path: Path, checkpoint: Callable[[], foreign.Folder]
) -> None:
    folder = checkpoint()
    codes, scales, *divisor = folder.arrays.values()
    weight = read(folder.write(tmp_path))
    assert weight.mode == checkpoint.__name__
    if divisor:  # a power of two: no rounding anywhere
        assert weight.global_scale.item() == 2688 / divisor[0].item()
    numbers = E4M3[scales] / divisor[0] if divisor else E8M0[scales]
    found = np.array(weight.decoded(), np.float64)
    np.testing.assert_array_equal(found, exact_of(codes, numbers))


@pytest.mark.parametrize("divisor", [np.nan, np.inf, 0.0, -1.0])
def test_divisors_of_compressed_tensors_are_numbers_above_0(
    divisor: float, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{LAYER}.*(NaN or infinite|above 0)"):
        read(nvfp4(divisor).write(tmp_path))


@pytest.mark.parametrize(("columns", "groups"), [(64, 5), (64, 8), (63, 4), (63, 8)])
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, columns: int, groups: int
) -> None:
    arrays = {
        f"{LAYER}.weight_packed": drawn(0, 32, columns),
        f"{LAYER}.weight_scale": drawn(1, 32, groups, high=200),
    }
    path = foreign.Folder(foreign.mxfp4_config(), arrays).write(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj\.weight'.*expected"):
        read(path)


GPT_OSS = settings_of("gpt-oss-20b")


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
            values = exact_of(codes, E8M0[scales])
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


def auto_round(packing: str | None, *, symmetric: bool, bits: int = 4) -> Any:
    """Returns a folder, and its weight."""
    weight = one_layer.drawn(bits, symmetric=symmetric, least_zero=1)
    arrays = foreign.gptq_arrays(LAYER, weight, 1)
    if str(packing).endswith("awq"):
        arrays = foreign.awq_arrays(LAYER, weight)
    settings = AUTO_ROUND | {"packing_format": packing, "sym": symmetric}
    if bits != 4:
        extra = {"bits": bits, "sym": symmetric, "data_type": "int"}
        settings = settings | {"extra_config": {LAYER: extra}}
    config = {"model_type": "llama", "quantization_config": settings}
    return foreign.Folder(config, arrays), weight


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
    folder, weight = auto_round(packing, symmetric=symmetric, bits=bits)
    found = read(folder.write(tmp_path))
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
    folder, _ = auto_round(packing, symmetric=symmetric)
    said = r"config\.json: .*packing_format=.*expected 'auto_round:auto_gptq'"
    with pytest.raises(ValueError, match=said):
        read(folder.write(tmp_path))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def fp8(
    shape: tuple[int, ...],
    *scale_shape: int,
    octets: bool = False,
    block: Sequence[int] = (128, 128),
) -> Any:
    """Returns bytes of E4M3, their scales, and the exact weights in float32.

    Scales have few digits, so that all products are exact.
    """
    rng = np.random.default_rng(0)
    codes = drawn(0, *shape) & 0xF7  # no NaN
    scales = 2.0 ** rng.integers(-9, -5, scale_shape)
    if not octets:
        scales = scales * rng.integers(1, 16, scale_shape)
    spread = scales
    for axis in (-1, -2) if len(scale_shape) > 1 else ():
        size, parts = shape[axis], scale_shape[axis]
        repeats = block[axis] if 1 < parts < size else 1
        spread = np.repeat(spread, repeats, axis)
        spread = spread if parts == 1 else spread.take(range(size), axis)
    stored = scales.astype(np.float32)
    if octets:
        stored = (np.log2(scales) + 127).astype(np.uint8)
    return codes, stored, (E4M3[codes] * spread).astype(np.float32)


def fp8_folder(path: Path, config: dict, arrays: dict, codes: list[str]) -> Path:
    settings = FP8 | {"weight_block_size": [128, 128]}
    foreign.Folder({"quantization_config": settings} | config, arrays).write(path)
    for name in codes:
        with_dtype(path / "model.safetensors", name, "F8_E4M3")
    return path


BLOCKS = [
    ((200, 300), (2, 3), False),
    ((200, 300), (4, 3), False),
    ((200, 300), (2, 3), True),
    ((3, 200, 300), (3, 2, 3), False),
    ((200, 300), (), False),
    ((200, 300), (1,), False),
    ((200, 300), (200, 1), False),
    ((3, 64, 96), (3, 1, 1), False),
]


@pytest.mark.parametrize(("shape", "scale_shape", "octets"), BLOCKS)
def test_originals_of_fp8_are_rounded_once(
    tmp_path: Path, shape: tuple[int, ...], scale_shape: tuple[int, ...], octets: bool
) -> None:
    block = [64, 128] if scale_shape == (4, 3) else [128, 128]
    codes, scales, exact = fp8(shape, *scale_shape, octets=octets, block=block)
    arrays = {
        f"{LAYER}.weight": codes,
        f"{LAYER}.weight_scale_inv": scales,
        f"{LAYER}.activation_scale": np.ones(1, np.float32),
    }
    said = {"quantization_config": FP8 | {"weight_block_size": block}}
    path = fp8_folder(tmp_path, said, arrays, [f"{LAYER}.weight"])
    if octets:
        with_dtype(path / "model.safetensors", f"{LAYER}.weight_scale_inv", "F8_E8M0")
    (tensor,) = tensors(path)
    assert mx.array_equal(tensor.read(), mx.array(exact).astype(mx.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 128]}, r"up_proj.*expected one number or \(4, 3\)"),
        ({"weight_block_size": None}, r"up_proj.*expected one number or \(1, 1\)"),
        (
            {"weight_block_size": [0, 128]},
            r"weight_block_size=\[0, 128\], expected two",
        ),
        ({"weight_block_size": 128}, "weight_block_size=128, expected two"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": None}, r"weight_scale_inv' beside it and a config with"),
    ],
)
def test_originals_of_fp8_that_contradict_their_config_are_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    codes, scales, _ = fp8((200, 300), 2, 3)
    arrays = {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale_inv": scales}
    path = fp8_folder(tmp_path, {}, arrays, [f"{LAYER}.weight"])
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    if change == {"quant_method": None}:
        config = {}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read(path)


MINIMAX = settings_of("MiniMax-M2")


@pytest.mark.parametrize("config", [MINIMAX, CONFIG], ids=["minimax", "llama"])
def test_models_of_fp8_are_those_of_mlx_lm(tmp_path: Path, config: dict) -> None:
    """Of llama, which mlx-lm does not decode, the exact weights are compared."""
    model = new_model(config)
    arrays, exact, codes = {}, {}, []
    for name, array in tree_flatten(model.parameters()):
        names = [name]
        if ".switch_mlp." in name:
            start, _, own = name.removesuffix(".weight").partition("switch_mlp.")
            names = [
                f"{start}experts.{e}.{W1_TO_W3[own]}.weight" for e in range(EXPERTS)
            ]
        if name.endswith("_proj.weight"):
            shape = array.shape[-2:]
            blocks = (-(-size // 128) for size in shape)
            stored, scales, values = fp8(shape, *blocks)
            arrays |= dict.fromkeys(names, stored)
            arrays |= dict.fromkeys((f"{each}_scale_inv" for each in names), scales)
            codes += names
        else:
            values = np.random.default_rng(1).normal(size=array.shape)
            arrays[name] = values.astype(np.float16)
        exact[name] = mx.array(values.astype(np.float32)).astype(mx.bfloat16)
    path = fp8_folder(tmp_path / "source", config, arrays, codes)
    if config is MINIMAX:
        stock, _ = utils.load_model(path)
        exact = dict(tree_flatten(stock.parameters()))
    [*convert(open_source(path), tmp_path / "result")]
    for folder in (path, tmp_path / "result"):
        found = dict(tree_flatten(load_model(open_source(folder)).parameters()))
        assert found.keys() == exact.keys()
        for name, array in found.items():
            if name.endswith("_proj.weight"):
                assert array.dtype == mx.bfloat16
                assert mx.array_equal(array, exact[name])
    assert needs_import(path)
    assert not needs_import(tmp_path / "result")
