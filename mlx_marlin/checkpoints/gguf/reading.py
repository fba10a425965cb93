"""A GGUF file as parameters of mlx-lm's models, one at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_marlin.checkpoints.gguf.architectures import (
    Architecture,
    architecture_of,
    layers_of,
    pieces_of,
)
from mlx_marlin.checkpoints.gguf.blocks import (
    LAYOUTS,
    PLAIN,
    BlockType,
    read_blocks,
    read_plain,
)
from mlx_marlin.checkpoints.gguf.container import Container, TensorInfo
from mlx_marlin.checkpoints.gguf.rows import (
    RULES,
    SCALES,
    Index,
    check_scale,
    global_scale,
)
from mlx_marlin.checkpoints.quantization import Quantization, rows_at_a_time
from mlx_marlin.checkpoints.stored_weight import StoredWeight, Tensor

DECODED = ("IQ", "TQ")
"""Beginnings of the names of types that the package `gguf` decodes."""


def check_decoder(name: str, quantization: Quantization | None) -> None:
    """Checks that a type without kernels can be quantized anew."""
    if not name.startswith(DECODED):
        read = ", ".join([*LAYOUTS, *PLAIN])
        raise ValueError(f"{name} is not one of the types that are read: {read}")
    if quantization is None:
        raise ValueError(
            f"{name} has no kernels; `mlx-marlin convert --requantize 4`, or "
            f"requantize=4 in Python, decodes it once and quantizes it anew, with an "
            f"error that the table of `convert` shows"
        )
    _decoder(name)


def requantized(
    data: memoryview,
    block: BlockType,
    shape: tuple[int, ...],
    quantization: Quantization,
    rows: Index | None = None,
) -> StoredWeight:
    """Decodes a weight [..., n, k] a few rows at a time, and quantizes it anew.

    Scales become float16. `rows` are those of each matrix that are read, in this order.
    """
    octets = np.frombuffer(data, np.uint8)
    octets = octets.reshape(*shape[:-1], shape[-1] // block.elements * block.nbytes)
    if rows is not None:
        octets = octets[..., rows, :]
        shape = (*shape[:-2], len(rows), shape[-1])
    decoded = _decoded(octets.reshape(-1, octets.shape[-1]), block, shape[-1])
    weight, error = quantization.apply_to_rows(decoded, shape, mx.float16)
    return replace(weight, original=block.name, error=error)


def _decoded(
    octets: npt.NDArray[np.uint8], block: BlockType, k: int
) -> Iterator[mx.array]:
    """Yields rows in float32, as many at a time as are quantized together."""
    decode, number = _decoder(block.name)
    step = rows_at_a_time(k)
    for first in range(0, len(octets), step):
        with np.errstate(all="ignore"):  # numbers that are not finite are refused later
            yield mx.array(decode(octets[first : first + step], number))


def _decoder(name: str) -> tuple[Any, Any]:
    """Returns the function that decodes rows of bytes, and its name of a type."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(
            f"decoding {name} needs the package gguf: pip install gguf", name=error.name
        ) from error
    return quants.dequantize, GGMLQuantizationType[name]


_SHARED_GATE = ".ffn_gate_inp_shexp."
_CONVOLUTION = re.compile(r"\.(ssm_conv1d|shortconv\.conv)\.weight$")
_DECAY = ".ssm_a"


def read(path: str | Path, requantize: Quantization | None = None) -> Iterator[Tensor]:
    """Lists the tensors of a GGUF file, in its order, which are read one at a time.

    They have mlx-lm's names. Quantized ones are read as `StoredWeight`, others as
    arrays of the file's dtype. Those of types without kernels, such as IQ2_XS, are
    refused unless `requantize` says how to quantize them anew.
    """
    return iter(tensors_of(Container(path), requantize))


def tensors_of(
    container: Container, requantize: Quantization | None = None
) -> list[Tensor]:
    """Returns the tensors of an open file, as `read` lists them."""
    architecture = architecture_of(container)
    layers = layers_of(container)
    tensors: list[Tensor] = []
    holders: dict[str, str] = {}
    for info in container.tensors.values():
        whole = _Source(container, architecture, info, requantize)
        scaled = _scaled(whole)
        try:
            if scaled is not None:
                check_scale(container, scaled, info)
                continue  # read with the weight; those of activations are not used
            pieces = pieces_of(architecture, info.name, layers)
            whole.check_type()
            for name, rule in pieces:
                if (holder := holders.setdefault(name, info.name)) != info.name:
                    raise ValueError(f"tensor {holder!r} holds {name!r} as well")
                rows = _rows(container, info, rule)
                source = replace(whole, rows=rows)
                tensors.append(
                    Tensor(
                        name=name,
                        format=info.type.name,
                        shape=source.parameter_shape,
                        nbytes=info.nbytes // len(pieces),
                        read=partial(_read, source),
                    )
                )
        except ValueError as error:
            raise whole.refusal(error) from None
    return tensors


def _rows(container: Container, info: TensorInfo, rule: str) -> Index | None:
    """Returns the rows that a rule selects; None for all of them, in order."""
    if not rule:
        return None
    axis = -2 if len(info.shape) > 1 else -1
    rows = RULES[rule](container, info.shape[axis])
    return None if np.array_equal(rows, np.arange(info.shape[axis])) else rows


def _scaled(source: "_Source") -> TensorInfo | None:
    """Returns the weight of which a tensor is a scale; None for other tensors."""
    parts = SCALES.fullmatch(source.info.name)
    if parts is None:
        return None
    weight = f"{parts[1]}.weight"
    is_own = parts[2] == "scale" and source.architecture.has_parameter_scale(weight)
    return None if is_own else source.container.tensors.get(weight)


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of a file, and what llama.cpp's conversion did to it."""

    container: Container
    architecture: Architecture
    info: TensorInfo
    # How to quantize it anew if its type has no kernels
    requantize: Quantization | None
    # Rows that are the parameter's, in its order; None for all of them
    rows: Index | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = self.info.shape
        is_gate = _SHARED_GATE in self.info.name and len(shape) == 1
        return (1, *shape) if is_gate else shape

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        shape = self.stored_shape
        if self.rows is not None:
            axis = len(shape) - 2 if len(shape) > 1 else 0
            shape = *shape[:axis], len(self.rows), *shape[axis + 1 :]
        return (*shape, 1) if _CONVOLUTION.search(self.info.name) else shape

    @property
    def columns(self) -> Index | None:
        """The features of x by column, if they are not in order."""
        if self.info.name.split(".")[-2] not in self.architecture.grouped_columns:
            return None
        # Column i of the parameter is column `grouped[i]` of the file.
        grouped = RULES["grouped"](self.container, self.info.shape[-1])
        order = np.argsort(grouped)
        return None if np.array_equal(order, np.arange(len(order))) else order

    @property
    def has_norm_offset(self) -> bool:
        return bool(self.architecture.norm_offset) and self.info.name.endswith(
            "norm.weight"
        )

    def check_type(self) -> None:
        name, shape = self.info.type.name, self.info.shape
        if name not in LAYOUTS and name not in PLAIN:
            check_decoder(name, self.requantize)
        vector = len(self.parameter_shape) < 2 or self.has_norm_offset
        vector = vector or _CONVOLUTION.search(self.info.name) is not None
        vector = vector or self.info.name.endswith(".bias")  # those of experts too
        if name not in PLAIN and vector:
            raise ValueError(f"{name} {shape} is for matrices, but this is a vector")

    def refusal(self, error: ValueError) -> ValueError:
        return ValueError(f"{self.container.path}: tensor {self.info.name!r}: {error}")


def _read(source: _Source) -> StoredWeight | mx.array:
    """Reads a tensor, and reverts what llama.cpp's conversion did to it."""
    try:
        stored = _stored(source)
        if isinstance(stored, StoredWeight):
            return _weight_in_order(source, stored)
        return _array_in_order(source, stored)
    except ValueError as error:
        raise source.refusal(error) from None
    finally:
        source.container.release(source.info)


def _stored(source: _Source) -> StoredWeight | mx.array:
    """Reads a tensor with its rows in the order of the file."""
    info, data = source.info, source.container.data(source.info)
    if info.type.name in PLAIN:
        array = read_plain(data, info.type, info.shape)
        if source.has_norm_offset:
            return _without_offset(array, source.architecture.norm_offset)
        return array
    if info.type.name not in LAYOUTS:
        assert source.requantize is not None  # or else `check_type` refused it
        shape = source.stored_shape
        return requantized(data, info.type, shape, source.requantize, source.rows)
    weight = read_blocks(data, info.type, source.stored_shape)
    is_own = source.architecture.has_parameter_scale(info.name)
    if info.type.name == "NVFP4" and not is_own:
        return replace(weight, global_scale=global_scale(source.container, info))
    return weight


def _array_in_order(source: _Source, stored: mx.array) -> mx.array:
    if source.rows is not None:
        axis = -2 if stored.ndim > 1 else -1
        stored = mx.take(stored, mx.array(source.rows), axis=axis)
    if (columns := source.columns) is not None:
        stored = mx.take(stored, mx.argsort(mx.array(columns)), axis=-1)
    if source.info.name.endswith(_DECAY):
        stored = _logarithm(stored)
    return stored.reshape(source.parameter_shape)


def _logarithm(stored: mx.array) -> mx.array:
    """Returns the weights, as float32, of which a file has -exp(weight), below 0."""
    decay = -np.array(stored.astype(mx.float32)).astype(np.float64)
    if not (decay > 0).all():
        raise ValueError("a decay is not below 0")
    return mx.array(np.log(decay).astype(np.float32))


def _weight_in_order(source: _Source, weight: StoredWeight) -> StoredWeight:
    if (columns := source.columns) is not None:
        weight = replace(weight, input_order=mx.array(columns.astype("int32")))
    if source.rows is None or weight.original:  # which is read in order
        return weight
    rows = mx.array(source.rows)
    parts = {
        name: mx.take(part, rows, axis=-2)
        for name in ("codes", "scales", "biases")
        if (part := getattr(weight, name)) is not None
    }
    return replace(weight, **parts)  # type: ignore[arg-type]


def _without_offset(array: mx.array, offset: float) -> mx.array:
    """Subtracts what a model adds again, exactly."""
    stored = array.astype(mx.float32)
    weight = stored - offset
    if not mx.array_equal(weight + offset, stored):
        raise ValueError(f"a norm's weight is not {offset} plus a float32, exactly")
    return weight
