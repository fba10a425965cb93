"""A GGUF file as parameters of mlx-lm's models, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_marlin.checkpoints.gguf.blocks import (
    LAYOUTS,
    PLAIN,
    read_blocks,
    read_plain,
)
from mlx_marlin.checkpoints.gguf.container import Container, TensorInfo
from mlx_marlin.checkpoints.gguf.names import (
    Architecture,
    architecture_of,
    parameter_name,
)
from mlx_marlin.checkpoints.gguf.scales import SCALES, check_scale, global_scale
from mlx_marlin.checkpoints.stored_weight import StoredWeight, Tensor

_SHARED_GATE = ".ffn_gate_inp_shexp."


def read(path: str | Path) -> Iterator[Tensor]:
    """Lists the tensors of a GGUF file, which are read one at a time.

    Args:
        path: A GGUF file of one of the architectures in `names.ARCHITECTURES`.

    Returns:
        The tensors, in the order of the file, with mlx-lm's names. Quantized ones are
        read as `StoredWeight`, others as arrays of the file's dtype.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not GGUF or is damaged, or if a tensor is no
            parameter of mlx-lm's model or of a type that is not read. Reading a tensor
            raises one if it cannot be represented exactly. The message names the file
            and the tensor.
    """
    return iter(tensors_of(Container(path)))


def tensors_of(container: Container) -> list[Tensor]:
    """Returns the tensors of an open file, as `read` lists them.

    Raises:
        ValueError: As `read` does.
    """
    architecture = architecture_of(container)
    permuted = _permuted_heads(container, architecture)
    tensors = []
    for info in container.tensors.values():
        stem = info.name.split(".")[-2:-1]
        heads = permuted.get(stem[0]) if stem else None
        source = _Source(container, architecture, info, heads)
        scaled = _scaled(container, info)
        try:
            if scaled is not None:
                if info.name.endswith(".scale"):
                    check_scale(container, scaled)
                continue  # read with the weight; those of activations are not used
            name = parameter_name(architecture, info.name)
            source.check_type()
        except ValueError as error:
            raise source.refusal(error) from None
        if name is not None:
            shape = source.parameter_shape
            read_tensor = partial(_read, source)
            tensors.append(
                Tensor(
                    name=name,
                    format=info.type.name,
                    shape=shape,
                    nbytes=info.nbytes,
                    read=read_tensor,
                )
            )
    return tensors


def _scaled(container: Container, info: TensorInfo) -> TensorInfo | None:
    """Returns the weight of which a tensor is a scale; None for other tensors."""
    parts = SCALES.fullmatch(info.name)
    return None if parts is None else container.tensors.get(f"{parts[1]}.weight")


def _permuted_heads(container: Container, architecture: Architecture) -> dict[str, int]:
    """Returns the heads of layers whose rows are permuted, by llama.cpp's name."""
    if not architecture.permuted:
        return {}
    key = f"{architecture.name}.attention.head_count"
    heads = key_heads = container.integer(key)
    if f"{key}_kv" in container.metadata:
        key_heads = container.integer(f"{key}_kv")
    return {"attn_q": heads, "attn_k": key_heads}


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of a file, and what llama.cpp's conversion did to it.

    Attributes:
        container: The file.
        architecture: The architecture.
        info: The tensor.
        permuted_heads: Heads whose rows are permuted; None if rows are in order.
    """

    container: Container
    architecture: Architecture
    info: TensorInfo
    permuted_heads: int | None

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        shape = self.info.shape
        if _SHARED_GATE in self.info.name and len(shape) == 1:
            return 1, *shape
        return shape

    @property
    def has_norm_offset(self) -> bool:
        return bool(self.architecture.norm_offset) and self.info.name.endswith(
            "norm.weight"
        )

    def check_type(self) -> None:
        name, shape = self.info.type.name, self.info.shape
        if name not in LAYOUTS and name not in PLAIN:
            raise ValueError(
                f"{name} is not one of the types that are read: "
                f"{', '.join([*LAYOUTS, *PLAIN])}"
            )
        vector = len(self.parameter_shape) < 2 or self.has_norm_offset
        if name in LAYOUTS and vector:
            raise ValueError(f"{name} {shape} is for matrices, but this is a vector")
        heads = self.permuted_heads
        if heads is not None and (heads == 0 or shape[0] % (2 * heads)):
            raise ValueError(
                f"{shape[0]} rows cannot be divided into pairs of {heads} heads"
            )

    def refusal(self, error: ValueError) -> ValueError:
        return ValueError(f"{self.container.path}: tensor {self.info.name!r}: {error}")


def _read(source: _Source) -> StoredWeight | mx.array:
    """Reads a tensor, and reverts what llama.cpp's conversion did to it."""
    try:
        stored = _stored(source)
    except ValueError as error:
        raise source.refusal(error) from None
    finally:
        source.container.release(source.info)
    if source.permuted_heads is None:
        return stored
    if isinstance(stored, StoredWeight):
        return _weight_rows_in_order(stored, source.permuted_heads)
    return rows_in_order(stored, source.permuted_heads)


def _stored(source: _Source) -> StoredWeight | mx.array:
    """Reads a tensor with its rows in the order of the file."""
    info, data = source.info, source.container.data(source.info)
    shape = source.parameter_shape
    if info.type.name in PLAIN:
        array = read_plain(data, info.type, shape)
        if source.has_norm_offset:
            return _without_offset(array, source.architecture.norm_offset)
        return array
    weight = read_blocks(data, info.type, shape)
    if info.type.name == "NVFP4":
        return replace(weight, global_scale=global_scale(source.container, info))
    return weight


def rows_in_order(array: mx.array, heads: int) -> mx.array:
    """Reverts the permutation of rows of q and k in llama.cpp's conversion of Llama.

    Of a head's rows, row i of the first half and row i of the second half are stored
    next to each other.

    Args:
        array: [n, ...].
        heads: Heads; n is a multiple of 2 * heads.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _weight_rows_in_order(weight: StoredWeight, heads: int) -> StoredWeight:
    parts = {
        name: rows_in_order(part, heads)
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
