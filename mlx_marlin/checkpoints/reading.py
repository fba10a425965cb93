"""Lists and reads the tensors of a checkpoint, whatever its format."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder, naming
from mlx_marlin.checkpoints.formats import (
    compressed_tensors,
    floating,
    gptq,
    marlin_folder,
    mlx_folder,
)
from mlx_marlin.checkpoints.location import check_location, gguf_file
from mlx_marlin.checkpoints.quantization import check_nothing_asked, quantization_of
from mlx_marlin.checkpoints.settings import method_of
from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight, Tensor
from mlx_marlin.weights.packed_weight import PackedWeight

Reader = Callable[[Folder, str, dict[str, Any]], StoredWeight]

PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("weight_shape", "weight_global_scale", "input_global_scale"),
    ),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "mlx": mlx_folder.PARTS,
}
"""The suffixes of a quantized layer's arrays, by method; the first ones are the codes.
"""
MARKS = {"mlx": "scales", "modelopt": "weight_scale_2"}
"""Suffix that quantized layers have and plain ones have not, if that of the codes is
that of plain weights too."""
FOREIGN_PARTS = {
    part for method in PARTS if method != "mlx" for part in PARTS[method]
} - {"scales", "weight", "input_scale", "input_global_scale"}
"""Suffixes that no plain array has."""
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
"""Dtypes that no plain weight has."""
FP8_SCALE = "_scale_inv"
"""End of the name of an array whose beginning names a weight of fp8."""
ACTIVATION_SCALES = ("activation_scale", "input_scale")
CACHE_PARTS = ("k_scale", "v_scale", "q_scale")
"""Scales of a quantized cache, which some tools store beside attention."""
SCHEMES: dict[str, Callable[[dict[str, Any]], object]] = {
    "gptq": gptq.schemes,
    "awq": gptq.awq_schemes,
    "compressed-tensors": compressed_tensors.schemes,
    "modelopt": floating.check_modelopt,
    "fp8": floating.block_of,
}
"""What checks the values of settings, by method."""
READERS: dict[str, Reader] = {
    "gptq": gptq.read,
    "awq": gptq.read_awq,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": floating.read_modelopt,
    "mlx": mlx_folder.read,
}


def read_checkpoint(
    path: str | Path, *, requantize: int | None = None
) -> Iterator[tuple[str, PackedWeight | mx.array]]:
    """Reads a checkpoint, one tensor at a time.

    Args:
        path: A folder with config.json and safetensors files in the format of MLX,
            GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt, ours or with plain
            arrays, or a GGUF file.
        requantize: Bits of affine codes, in groups of 64, that weights of a GGUF file
            get if their type has no kernels, such as IQ2_XS. Default: such a file is
            refused.

    Yields:
        The name of a parameter and its value: a packed weight for a quantized layer,
        exactly as stored unless `requantize` changes it, else an array. If the columns
        of a weight are not in the order of x (act-order), `NAME.input_order` follows,
        int32 [k]: column i of the weight multiplies feature `input_order[i]`.

    Raises:
        ImportError: If `requantize` needs the package `gguf`, and it is missing.
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is malformed, or a weight cannot be represented exactly;
            the message names file and tensor.
    """
    for tensor in tensors(path, requantize):
        value = tensor.read()
        if isinstance(value, mx.array):
            yield tensor.name, value
            continue
        with naming(Path(path), tensor.name):
            packed = value.packed()
        yield tensor.name, packed
        if value.input_order is not None:
            layer = tensor.name.removesuffix(".weight")
            yield f"{layer}.input_order", value.input_order


def tensors(path: str | Path, requantize: int | None = None) -> list[Tensor]:
    """Returns the tensors of a checkpoint, checked by their headers, not read yet."""
    check_location(Path(path))
    how = quantization_of(requantize)
    file = gguf_file(Path(path))
    if file is not None:
        from mlx_marlin.checkpoints import gguf  # which needs NumPy

        return [*gguf.read(file, how)]
    check_nothing_asked(path, how)
    return folder_tensors(Folder(Path(path)))


def folder_tensors(
    folder: Folder, *, for_model: bool = False, check_values: bool = True
) -> list[Tensor]:
    """Returns the tensors of an open folder, as `tensors` does."""
    method, settings = method_of(folder)
    if method in SCHEMES:
        try:
            SCHEMES[method](settings)
        except ValueError as error:
            raise ValueError(f"{folder.path}: quantization_config: {error}") from error
    packed = marlin_folder.layers_of(folder)
    layers = _quantized_layers(folder, method)
    parts = {f"{layer}.{part}" for layer in layers for part in PARTS.get(method, ())}
    for layer in packed:
        parts.update(marlin_folder.names_of(folder, layer).values())
    plain = [name for name in folder.arrays if name not in parts]
    if method in ("compressed-tensors", "modelopt"):
        plain = [name for name in plain if name.rpartition(".")[2] not in CACHE_PARTS]
    if method == "fp8":
        plain = [name for name in plain if not _is_scale_of_fp8(folder, name)]
    for name in plain:
        _check_plain(folder, name, method)
    if for_model and method == "mlx":
        plain += [name for name in folder.arrays if name in parts]
        layers = []
    _check_names(folder, [*packed, *layers], plain)
    checks = check_values and not for_model
    return [
        *(
            _packed(folder, layer, record, check_values)
            for layer, record in packed.items()
        ),
        *(_quantized(folder, layer, method, settings, checks) for layer in layers),
        *(_plain(folder, name, method, settings) for name in plain),
    ]


def _is_scale_of_fp8(folder: Folder, name: str) -> bool:
    of_weight = folder.arrays.get(name.removesuffix(FP8_SCALE))
    is_scale = name.endswith(FP8_SCALE) and of_weight is not None
    return is_scale or name.rpartition(".")[2] in ACTIVATION_SCALES


def _check_names(folder: Folder, layers: list[str], plain: list[str]) -> None:
    """Raises a ValueError if two tensors would have one name."""
    names = [
        f"{layer}.{part}" for layer in layers for part in ("weight", "input_order")
    ]
    for name, count in Counter([*names, *plain]).items():
        if count > 1:
            raise ValueError(
                f"{folder.path}: tensor {name!r} is there twice, as an array and in "
                f"the codes of a quantized layer: remove the one that is not meant"
            )


def _check_plain(folder: Folder, name: str, method: str) -> None:
    """Raises a ValueError if an array belongs to a quantized layer that is incomplete.

    The arrays beside it are missing, or the config says nothing of such layers.
    """
    layer, _, part = name.rpartition(".")
    dtype = folder.arrays[name].dtype
    if part == "weight" and dtype in INTEGERS:
        wanted = MARKS.get(method, "scales")
    elif part in FOREIGN_PARTS or (part == "scales" and method in PARTS):
        wanted = PARTS.get(method, ("weight",))[0]
        if f"{layer}.{wanted}" in folder.arrays:
            wanted = MARKS.get(method, wanted)
    else:
        return
    raise ValueError(
        f"{folder.path}: tensor {name!r} ({dtype}) is of a quantized layer, expected "
        f"'{layer}.{wanted}' beside it and a config that says so (it says "
        f"quant_method={method or None!r})"
    )


def _quantized_layers(folder: Folder, method: str) -> list[str]:
    if method not in PARTS:
        return []
    codes = PARTS[method][0]
    mark = MARKS.get(method, codes)
    return [
        layer
        for name in folder.arrays
        if name.endswith(f".{codes}")
        and f"{(layer := name.removesuffix(f'.{codes}'))}.{mark}" in folder.arrays
    ]


def _tensor(
    folder: Folder,
    name: str,
    parts: Iterable[str],
    read: Callable[[], StoredWeight | PackedLayer | mx.array],
    **said: Any,
) -> Tensor:
    """Returns a tensor of those of the named arrays that are there."""

    def named() -> StoredWeight | PackedLayer | mx.array:
        with naming(folder.path, name):
            return read()

    stored = [folder.arrays[part] for part in parts if part in folder.arrays]
    nbytes = sum(array.nbytes for array in stored)
    return Tensor(name=name, nbytes=nbytes, read=named, **said)


def _packed(folder: Folder, layer: str, record: dict[str, Any], check: bool) -> Tensor:
    parts = marlin_folder.names_of(folder, layer).values()
    read = partial(marlin_folder.read, folder, layer, record, check)
    said = {"format": record["layout"], "shape": (record["n"], record["k"])}
    return _tensor(folder, f"{layer}.weight", parts, read, **said)


def _quantized(
    folder: Folder, layer: str, method: str, settings: dict[str, Any], check: bool
) -> Tensor:
    def read() -> StoredWeight:
        weight = READERS[method](folder, layer, settings)
        return weight.checked() if check else weight

    parts = [f"{layer}.{part}" for part in PARTS[method]]
    said = {"format": method, "shape": folder.arrays[parts[0]].shape}
    return _tensor(folder, f"{layer}.weight", parts, read, **said)


def _plain(folder: Folder, name: str, method: str, settings: dict[str, Any]) -> Tensor:
    stored, scale = folder.arrays[name], f"{name}{FP8_SCALE}"
    is_fp8 = stored.dtype in ("F8_E4M3", "F8_E8M0")  # which MLX reads as uint8
    is_known = method == "fp8" and stored.dtype == "F8_E4M3" and scale in folder.arrays

    def read() -> mx.array:
        if not is_fp8:
            return folder.read(name)
        if not is_known:
            raise ValueError(
                f"{stored.file}: tensor {name!r} is {stored.dtype}, expected another "
                f"dtype, or {scale!r} beside it and a config with quant_method 'fp8'"
            )
        return floating.fp8(folder.read(name), folder.read(scale), settings)

    return _tensor(folder, name, [name], read, format=stored.dtype, shape=stored.shape)
