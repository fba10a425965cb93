"""A folder of safetensors files as a model of mlx-lm's."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.checkpoints import reading
from mlx_marlin.checkpoints.folder import INDEX, Folder, naming, new_model
from mlx_marlin.checkpoints.formats import marlin_folder, mlx_folder
from mlx_marlin.checkpoints.settings import SEPARATE_FILES, check_code, method_of
from mlx_marlin.checkpoints.stored_weight import StoredWeight, Tensor
from mlx_marlin.checkpoints.writing import copy_within
from mlx_marlin.lm.checkpoints.model_source import NARROW, ModelSource, Value
from mlx_marlin.lm.checkpoints.moved_rows import fold_orders
from mlx_marlin.lm.checkpoints.renaming import (
    Arrays,
    Renamed,
    Source,
    renamed,
    stack,
)
from mlx_marlin.lm.known_layers import is_plain_heads
from mlx_marlin.lm.module_tree import natural_key

WEIGHT_FILES = (
    *("*.safetensors", INDEX, "config.json", *SEPARATE_FILES),
    *("*.bin", "*.bin.index.json", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5"),
    *("*.msgpack", "*.onnx", "*.onnx_data", "*.tflite"),
)
"""Files of a folder that a conversion replaces, and weights in other containers."""
FLOATS = ("F16", "BF16", "F32", "F8_E4M3")
LAYER = re.compile(r"(.*?\blayers\.(\d+))\.")
"""A tensor of a numbered layer."""
DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")
"""Keys of a config: how many layers after the model's own predict further tokens."""
DRAFT_PART = "eh_proj"
"""A part that only such layers have: it joins an embedding and a hidden state."""
DRAFT_NAME = re.compile(r"(?:.*?\.)?mtp\w*(?=\.)")


class FolderSource(ModelSource):
    """A folder of safetensors files."""

    def __init__(self, path: Path, *, check_values: bool = True) -> None:
        self.path = path
        self._folder = Folder(path)
        self.config = self._folder.config
        check_code(self.config, str(path / "config.json"))
        self._method, self._settings = method_of(self._folder)
        self._check_values = check_values
        self._plain_dtype: mx.Dtype | None = None
        self.computed: dict[str, float] = {}

    def plain_matrices(self) -> list[str]:
        """Returns the names, not renamed yet, of arrays of floats of several axes."""
        is_ours = bool(marlin_folder.layers_of(self._folder))
        return [
            tensor.name
            for tensor in reading.folder_tensors(self._folder, for_model=not is_ours)
            if tensor.format in FLOATS
            and len(tensor.shape) > 1
            and tensor.name.rpartition(".")[2] not in mlx_folder.PARTS[1:]
        ]

    def stored_parameters(self) -> Iterator[tuple[str, Value]]:
        """Yields the name and the value of each parameter."""
        packed = bool(marlin_folder.layers_of(self._folder))
        tensors = reading.folder_tensors(
            self._folder, for_model=not packed, check_values=self._check_values
        )
        if packed:  # written under mlx-lm's names
            tensors.sort(key=lambda tensor: natural_key(tensor.name))
            self.drop_absent_layers(tensors)
            yield from ((tensor.name, tensor.read()) for tensor in tensors)
            return
        weights, arrays, computed = self._renamed(tensors)
        self._drop_heads_of_embeddings(weights, arrays)
        plain = {  # but no biases: tools write zeros of any dtype, which models lack
            array.dtype
            for name, array in arrays.items()
            if name not in computed and not name.endswith(".bias")
        }.intersection(NARROW)
        self._plain_dtype = plain.pop() if len(plain) == 1 else None
        # Not the config's model_type: mlx-lm has one module for several of them.
        module = type(self.model).__module__.rpartition(".")[2]
        self.folded = fold_orders(weights, arrays, module)
        dtype = self._plain_dtype or mx.float32
        names = [*(f"{layer}.weight" for layer in weights), *arrays]
        for name in sorted(names, key=natural_key):
            layer = name.removesuffix(".weight")
            if name not in arrays and self._holds(layer, weights[layer]):
                yield name, self._checked(name, weights.pop(layer))
            elif name in arrays and name not in computed:
                yield name, arrays.pop(name)
            else:
                values = arrays.pop(name, None)
                values = weights.pop(layer).values() if values is None else values
                yield name, self._narrowed(name, values, dtype)

    def _holds(self, layer: str, weight: StoredWeight) -> bool:
        """Returns whether the model's layer can have a weight.

        Heads multiply from both sides, which gathers no columns of x, and they have no
        global scales.
        """
        is_simple = weight.input_order is None and weight.global_scale is None
        return is_simple or not is_plain_heads(self.layer(layer))

    def _checked(self, name: str, weight: StoredWeight) -> StoredWeight:
        with naming(self.path, name):
            if not self._check_values:
                return weight
            return _with_dtype(weight.checked(), self._plain_dtype)

    def _narrowed(self, name: str, values: mx.array, dtype: mx.Dtype) -> mx.array:
        """Returns what was computed in float32 in the dtype of activations."""
        narrow = values.astype(dtype)
        self.computed[name] = math.nan
        if not self._check_values:
            return narrow
        if not mx.all(mx.isfinite(values)):
            raise ValueError(
                f"{self.path}: tensor {name!r} is computed from weights that are not "
                f"finite, or of which the format is not known"
            )
        if not mx.all(mx.isfinite(narrow)):
            narrow = values
        change = mx.linalg.norm(narrow.astype(mx.float32) - values)
        self.computed[name] = float(change / mx.maximum(mx.linalg.norm(values), 1e-30))
        return narrow

    def _drop_heads_of_embeddings(
        self, weights: dict[str, StoredWeight], arrays: Arrays
    ) -> None:
        """Drops the head of a tied model, which is its embedding, in place."""
        layers = {*weights, *(name.rpartition(".")[0] for name in arrays)}
        modules = self.model.named_modules()
        embeddings = [name for name, each in modules if isinstance(each, nn.Embedding)]
        for head in layers:
            if f".{head}".endswith(".lm_head") and self.layer(head) is None:
                own, *others = (
                    _parts(layer, weights, arrays) for layer in (head, *embeddings)
                )
                if own and not any(_are_equal(own, other) for other in others):
                    raise ValueError(
                        f"{self.path}: tensor {head + '.weight'!r} differs from the "
                        f"embedding, which is this model's head (tie_word_embeddings): "
                        f"set that to false in config.json, or remove the tensor"
                    )
                weights.pop(head, None)
                arrays.pop(f"{head}.weight", None)

    def _renamed(self, tensors: list[Tensor]) -> Renamed:
        """Returns all parameters, not evaluated, after the model's own `sanitize`."""
        plain: Arrays = {}
        sources: dict[str, Source] = {}
        for tensor in self._without_drafts(tensors):
            value = tensor.read()
            if isinstance(value, mx.array):
                plain[tensor.name] = value
            elif isinstance(value, StoredWeight):
                layer = tensor.name.removesuffix(".weight")
                sources[layer] = Source(value.codes.shape[:-1], partial(_itself, value))
        if self._method == "mlx":
            sources = self._of_mlx(plain)
        # A layer that the model has was quantized under its name, after `sanitize`.
        # Some models look at its scales, and then change nothing.
        known = [layer for layer in sources if self.layer(layer) is not None]
        marks = {
            f"{layer}.scales": mx.zeros(1) for layer in known if self._method == "mlx"
        }
        alike = {_without_numbers(layer) for layer in sources}
        for name, array in plain.items():
            layer = name.removesuffix(".weight")
            if array.ndim == 2 and layer != name and _without_numbers(layer) in alike:
                sources[layer] = Source(array.shape[:-1], None)
        models = new_model(self.config), self.model
        on_tags, on_values = (
            partial(self._sanitized, model, marks) for model in models
        )
        result = renamed(self.path, sources, plain, on_tags, on_values)
        for layer, source in self._of_mlx(result.arrays).items():
            with naming(self.path, f"{layer}.weight"):
                assert source.read is not None
                result.weights[layer] = source.read(layer)
        return result

    def _sanitized(self, model: Any, marks: Arrays, arrays: Arrays) -> Arrays:
        found = self.sanitized(arrays | marks, model)
        return stack({n: a for n, a in found.items() if n not in marks}, self.layer)

    def _of_mlx(self, arrays: Arrays) -> dict[str, Source]:
        """Removes the arrays of layers in MLX's formats, and returns these layers."""
        found: dict[str, Source] = {}
        for name in [name for name in arrays if name.endswith(".scales")]:
            layer = name.removesuffix(".scales")
            if self._method == "mlx" and f"{layer}.weight" in arrays:
                names = {part: f"{layer}.{part}" for part in mlx_folder.PARTS}
                parts = {p: arrays.pop(n) for p, n in names.items() if n in arrays}
                shape = parts["weight"].shape[:-1]
                found[layer] = Source(shape, partial(self._mlx_weight, layer, parts))
        return found

    def _mlx_weight(self, layer: str, parts: Arrays, target: str) -> StoredWeight:
        weight = getattr(self.layer(target), "weight", None)
        k = None if weight is None else int(weight.shape[-1])
        entry = self._settings.get(layer if k is None else target)
        return mlx_folder.stored_weight(parts, self._settings, entry, k)

    def _without_drafts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors without those of layers that predict further tokens.

        Such layers are named "mtp", or come after the model's own, which is told by the
        config or by a part of theirs. Not all of mlx-lm's models drop them.
        """
        config = self.config.get("text_config") or self.config
        depth = config.get("num_hidden_layers", config.get("num_layers"))
        counts = [
            count for key in DRAFT_LAYERS if type(count := config.get(key)) is int
        ]
        names = [tensor.name for tensor in tensors]
        matches = [match for name in names if (match := LAYER.match(name)) is not None]
        drafts = {m[1] for m in matches if m.string.startswith(DRAFT_PART, m.end())}
        if isinstance(depth, int):
            indices = {match[1]: int(match[2]) - depth for match in matches}
            told = {layer for layer, index in indices.items() if index < sum(counts)}
            drafts = {layer for layer in drafts | told if indices[layer] >= 0}
        named = {m[0] for name in names if (m := DRAFT_NAME.match(name)) is not None}
        drafts |= {name for name in named if self.layer(name) is None}
        return [
            tensor
            for tensor in tensors
            if not any(tensor.name.startswith(f"{draft}.") for draft in drafts)
        ]

    def copy_other_files(self, folder: Path) -> None:
        """Copies the tokenizer, the licence and whatever else is in the folder."""
        for file in sorted(self.path.iterdir()):
            if file.is_file() and not any(map(file.match, WEIGHT_FILES)):
                copy_within(file, folder / file.name)


def _itself(weight: StoredWeight, target: str) -> StoredWeight:
    return weight


def _without_numbers(layer: str) -> str:
    return re.sub(r"\d+", "", layer)


def _with_dtype(weight: StoredWeight, dtype: mx.Dtype | None) -> StoredWeight:
    """Returns a weight with scales of the model's dtype, if that rounds none.

    MLX's product of scales and activations of two dtypes is float32.
    """
    if dtype is None or weight.scales.dtype not in NARROW:
        return weight
    scales, biases = weight.scales.astype(dtype), None
    is_exact = bool(mx.array_equal(scales, weight.scales))
    if weight.biases is not None:
        biases = weight.biases.astype(dtype)
        is_exact = is_exact and bool(mx.array_equal(biases, weight.biases))
    return replace(weight, scales=scales, biases=biases) if is_exact else weight


def _parts(
    layer: str, weights: dict[str, StoredWeight], arrays: Arrays
) -> dict[str, Any]:
    """Returns what a layer's weight is, by name; nothing if there is none."""
    if (weight := weights.get(layer)) is not None:
        return {each.name: getattr(weight, each.name) for each in fields(weight)}
    name = f"{layer}.weight"
    return {"weight": arrays[name]} if name in arrays else {}


def _are_equal(own: dict[str, Any], other: dict[str, Any]) -> bool:
    return own.keys() == other.keys() and all(
        bool(mx.array_equal(value, other[name]))
        if isinstance(value, mx.array) and isinstance(other[name], mx.array)
        else value is other[name] or value == other[name]
        for name, value in own.items()
    )
