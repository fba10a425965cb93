"""The parameters of a checkpoint under mlx-lm's names, one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.checkpoints.folder import new_model
from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight, Tensor
from mlx_marlin.regular_files import quoted
from mlx_marlin.versions import describe
from mlx_marlin.warn_once import warn_once
from mlx_marlin.weights.dtypes import dtype_name

Value = StoredWeight | PackedLayer | mx.array
"""What a parameter is: a weight in rows of codes or packed, or an array."""
NARROW = (mx.float16, mx.bfloat16)


def description(value: Value) -> str:
    """Returns the format of a parameter, such as "affine 4-bit, group 64"."""
    if isinstance(value, mx.array):
        return dtype_name(value.dtype)
    weight = value.weight if isinstance(value, PackedLayer) else value
    return f"{weight.mode} {weight.bits}-bit, group {weight.group_size}"


class Dtypes:
    """Dtypes of 16 bits of the scales of a model, and of its plain weights."""

    def __init__(self) -> None:
        self._scales: set[mx.Dtype] = set()
        self._plain: set[mx.Dtype] = set()

    def add(self, name: str, value: Value) -> None:
        """Adds those of a parameter, but not of biases, which layers may lack."""
        if isinstance(value, mx.array):
            own, dtype = self._plain, value.dtype
        else:
            weight = value.weight if isinstance(value, PackedLayer) else value
            own, dtype = self._scales, weight.scales.dtype
        if dtype in NARROW and not name.endswith(".bias"):
            own.add(dtype)

    def tell(self, path: Path) -> None:
        """Warns that activations become float32, because two dtypes meet."""
        if self._scales and self._plain and len(self._scales | self._plain) > 1:
            scales, plain = (
                " and ".join(sorted(map(dtype_name, each)))
                for each in (self._scales, self._plain)
            )
            warn_once(
                f"dtypes: {path}",
                f"{path} has scales of {scales} and other weights of {plain}, which "
                f"have no common dtype but float32: so activations and the cache are "
                f"float32. model.set_dtype(mlx.core.float16) rounds the latter",
            )


class ModelSource(ABC):
    """A checkpoint that mlx-lm has a model for."""

    path: Path  # The folder or file
    config: dict[str, Any]  # What mlx-lm's config.json holds
    # Layers whose column order became the row order of others, once the first parameter
    # was read
    folded: Set[str] = frozenset()
    # Parameters that mlx-lm's model computes from weights that are quantized in the
    # checkpoint, once each was read: the error of their dtype relative to float32
    computed: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def plain_matrices(self) -> list[str]:
        """Returns the names, not renamed yet, of arrays of floats of several axes."""

    @abstractmethod
    def stored_parameters(self) -> Iterator[tuple[str, Value]]:
        """Yields what `parameters` does, without comparing it with the model."""

    def parameters(self) -> Iterator[tuple[str, Value]]:
        """Returns an iterator over the name and the value of each parameter.

        A quantized weight of layer L is a `StoredWeight` with the name L.weight. Values
        are not kept: their memory is freed when the caller drops them. Biases that are
        zero are omitted if the model has none: GPTQ tools write them.
        """
        missing, dtypes = set(self._shapes), Dtypes()
        # `filter` and `chain` keep no reference to what they have yielded.
        known = filter(
            partial(self._has_place, missing, dtypes), self.stored_parameters()
        )
        return chain(known, self._completed(missing, dtypes))

    def _completed(
        self, missing: set[str], dtypes: Dtypes
    ) -> Iterator[tuple[str, Value]]:
        """Yields nothing, and raises a ValueError if parameters are missing.

        `sanitize` removes layers from some models, such as the output of a tied one.
        """
        dtypes.tell(self.path)
        layers = {name: self.layer(name.rpartition(".")[0]) for name in missing}
        absent = sorted(name for name, layer in layers.items() if layer is not None)
        if absent:
            raise ValueError(
                f"{self.path}: tensors {absent[:3]} are missing, expected in "
                f"mlx-lm's {type(self.model).__module__} ({describe('mlx-lm')})"
            )
        yield from ()

    def _has_place(
        self, missing: set[str], dtypes: Dtypes, parameter: tuple[str, Value]
    ) -> bool:
        """Returns whether the model has a parameter, which is then not missing."""
        name, value = parameter
        expected = self._shapes.get(name)
        if expected is None and _is_zero_bias(name, value):
            return False
        if isinstance(value, PackedLayer):
            packed = value.weight
            shape = (*packed.batch, packed.n, packed.k)
        else:
            shape = tuple(value.shape)
        if expected is None or shape != expected:
            raise ValueError(
                f"{self.path}: tensor {name!r} of shape {shape}, expected "
                f"{expected or 'no such tensor'} in mlx-lm's "
                f"{type(self.model).__module__} ({describe('mlx-lm')})"
            )
        if _is_whole(value) and name not in self._whole:
            raise ValueError(
                f"{self.path}: tensor {name!r} is {value.dtype}, expected floats: "
                f"nothing says what its integers stand for"
            )
        missing.discard(name)
        dtypes.add(name, value)
        return True

    def sanitized(
        self, arrays: dict[str, mx.array], model: nn.Module | None = None
    ) -> dict[str, mx.array]:
        """Returns arrays after the `sanitize` of a model, which may change the model.

        It is the source's own model, unless another one is given.
        """
        sanitize = getattr(self.model if model is None else model, "sanitize", None)
        if sanitize is None:
            return arrays
        try:
            renamed: dict[str, mx.array] = sanitize(arrays)
        except Exception as error:  # it expects the tensors of its models
            raise ValueError(
                f"{self.path}: mlx-lm cannot rename the tensors of a "
                f"{quoted(self.config.get('model_type'))} model: {quoted(error)} "
                f"({describe('mlx-lm')})"
            ) from error
        return renamed

    def drop_absent_layers(self, tensors: Iterable[Tensor]) -> None:
        """Lets mlx-lm drop layers that a checkpoint with its names does not have.

        Some models do so in `sanitize` only, such as Gemma 3 with the output of a tied
        model. Arrays of zeros, never computed, stand for the tensors.
        """
        self.sanitized({tensor.name: mx.zeros(tensor.shape) for tensor in tensors})

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's parameters, before layers are replaced."""
        named: Any = tree_flatten(self.model.parameters())
        return {name: tuple(array.shape) for name, array in named}

    @cached_property
    def _whole(self) -> set[str]:
        """Names of the model's parameters that are integers."""
        named: Any = tree_flatten(self.model.parameters())
        return {name for name, array in named if _is_whole(array)}

    @abstractmethod
    def copy_other_files(self, folder: Path) -> None:
        """Writes what a model needs beside weights and config.json to a folder."""

    @cached_property
    def model(self) -> nn.Module:
        """A model of this architecture; its random parameters are never computed."""
        try:
            return new_model(self.config)
        except Exception as error:  # mlx-lm does not check the values of a config
            raise ValueError(
                f"{self.path}: mlx-lm has no model for it: {quoted(error)} "
                f"({describe('mlx-lm')})"
            ) from error

    def layer(self, name: str) -> Any:
        """Returns the layer of the model that has a name; None if there is none."""
        module: Any = self.model
        try:
            for part in name.split("."):
                module = module[int(part)] if part.isdecimal() else module[part]
        except (KeyError, IndexError, TypeError):
            return None
        return module


def _is_whole(value: Value) -> TypeGuard[mx.array]:
    return isinstance(value, mx.array) and not mx.issubdtype(value.dtype, mx.floating)


def _is_zero_bias(name: str, value: Value) -> bool:
    if not isinstance(value, mx.array) or not name.endswith(".bias"):
        return False
    return not mx.any(value)
