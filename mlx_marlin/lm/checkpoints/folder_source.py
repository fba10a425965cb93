"""A folder of safetensors files as a model of mlx-lm's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.checkpoints import reading
from mlx_marlin.checkpoints.copying import copy_within
from mlx_marlin.checkpoints.folder import INDEX, Folder, naming
from mlx_marlin.checkpoints.formats import marlin_folder, mlx_folder
from mlx_marlin.checkpoints.setting_keys import check_code
from mlx_marlin.checkpoints.settings import SEPARATE_FILES, method_of
from mlx_marlin.checkpoints.stored_weight import StoredWeight, Tensor
from mlx_marlin.lm.checkpoints import experts
from mlx_marlin.lm.checkpoints.folding import fold_orders
from mlx_marlin.lm.checkpoints.model_source import NARROW, ModelSource, Value
from mlx_marlin.lm.module_tree import natural_key

ROWS = ("weight", "scales", "biases", "global_scale", "input_order")
"""The arrays of a quantized layer while mlx-lm renames and stacks them."""
WEIGHT_FILES = (
    *("*.safetensors", INDEX, "config.json", *SEPARATE_FILES),
    *("*.bin", "*.bin.index.json", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5"),
    *("*.msgpack", "*.onnx", "*.onnx_data", "*.tflite"),
)
"""Files of a folder that a conversion replaces, and weights in other containers."""
FLOATS = ("F16", "BF16", "F32")
FLOATING = {16: "nvfp4", 32: "mxfp4"}
"""Modes with a byte for each scale, by the group size."""
_replacing = threading.Lock()
"""Held while `mx.dequantize` is replaced."""


class FolderSource(ModelSource):
    """A folder of safetensors files.

    Args:
        path: The folder.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = Folder(path)
        self.config = self._folder.config
        check_code(self.config, str(path / "config.json"))
        self._method, self._settings = method_of(self._folder)
        self._plain_dtype: mx.Dtype | None = None
        self._stored_widths: set[tuple[int, int]] = set()

    def names(self) -> list[str]:
        """Returns the names of all stored arrays, before they are renamed."""
        return [*self._folder.arrays]

    def plain_matrices(self) -> list[str]:
        """Returns the names, not renamed yet, of arrays of floats of several axes."""
        is_ours = bool(marlin_folder.layers_of(self._folder))
        return [
            tensor.name
            for tensor in reading.folder_tensors(self._folder, for_model=not is_ours)
            if tensor.format in FLOATS
            and len(tensor.shape) > 1
            and tensor.name.rpartition(".")[2] not in ROWS[1:]
        ]

    def stored_parameters(self) -> Iterator[tuple[str, Value]]:
        """Yields the name and the value of each parameter."""
        if marlin_folder.layers_of(self._folder):  # written under mlx-lm's names
            tensors = reading.folder_tensors(self._folder)
            tensors.sort(key=lambda tensor: natural_key(tensor.name))
            self.drop_absent_layers(tensors)
            yield from ((tensor.name, tensor.read()) for tensor in tensors)
            return
        arrays = self._renamed(reading.folder_tensors(self._folder, for_model=True))
        self._drop_heads_of_embeddings(arrays)
        self._plain_dtype = _plain_dtype(arrays)
        # Not the config's model_type: mlx-lm has one module for several of them.
        module = type(self.model).__module__.rpartition(".")[2]
        self.folded = fold_orders(arrays, module)
        for name in sorted(arrays, key=natural_key):
            layer, _, part = name.rpartition(".")
            if name not in arrays or (part in ROWS[1:] and f"{layer}.weight" in arrays):
                continue  # goes with the layer's weight
            if part == "weight" and f"{layer}.scales" in arrays:
                yield name, self._stored_weight(layer, arrays)
            else:
                yield name, arrays.pop(name)

    def _renamed(self, tensors: list[Tensor]) -> dict[str, mx.array]:
        """Returns all arrays, not evaluated, after the model's own `sanitize`."""
        arrays: dict[str, mx.array] = {}
        columns: dict[str, int] = {}
        for tensor in tensors:
            value = tensor.read()
            if isinstance(value, mx.array):
                arrays[tensor.name] = value
            elif isinstance(value, StoredWeight):
                self._stored_widths.add((value.bits, value.group_size))
                layer = tensor.name.removesuffix(".weight")
                columns[layer] = value.shape[-1]
                arrays |= _rows(layer, value)
        experts.add_orders(arrays, columns)
        with _no_dequantizing(self._method):
            renamed = self.sanitized(dict(arrays))
            experts.move_parts(arrays, renamed, self.sanitized)
        experts.stack(renamed, self.layer)
        return renamed

    def _drop_heads_of_embeddings(self, arrays: dict[str, mx.array]) -> None:
        """Drops the head of a tied model, which is its embedding; changes `arrays`.

        Raises:
            ValueError: If a file has another head than the embedding.
        """
        heads = {
            name.rpartition(".")[0] for name in arrays if ".lm_head." in f".{name}"
        }
        for head in (head for head in heads if self.layer(head) is None):
            own, *others = (
                {
                    part: arrays[f"{layer}.{part}"]
                    for part in ROWS
                    if f"{layer}.{part}" in arrays
                }
                for layer in (head, *self._embeddings)
            )
            # Models that drop a head themselves leave the parts of a quantized one.
            if "weight" in own and not any(_are_equal(own, other) for other in others):
                raise ValueError(
                    f"{self.path}: tensor {head + '.weight'!r} differs from the "
                    f"embedding, which is this model's head (tie_word_embeddings): set "
                    f"that to false in config.json, or remove the tensor"
                )
            for part in own:
                del arrays[f"{head}.{part}"]

    @property
    def _embeddings(self) -> list[str]:
        modules = self.model.named_modules()
        return [name for name, layer in modules if isinstance(layer, nn.Embedding)]

    def _stored_weight(self, layer: str, arrays: dict[str, mx.array]) -> StoredWeight:
        own = [part for part in ROWS if f"{layer}.{part}" in arrays]
        rows = {part: arrays.pop(f"{layer}.{part}") for part in own}
        with naming(self.path, f"{layer}.weight"):
            if self._method == "mlx":
                k, entry = self._columns(layer), self._settings.get(layer)
                weight = mlx_folder.stored_weight(rows, self._settings, entry, k)
            else:
                weight = self._foreign_weight(layer, rows)
            return _with_dtype(weight.checked(), self._plain_dtype)

    def _foreign_weight(self, layer: str, rows: dict[str, mx.array]) -> StoredWeight:
        codes, scales = rows["weight"], rows["scales"]
        bits, group_size = self._widths(layer, codes, scales)
        mode = "zero_point" if "biases" in rows else "symmetric"
        order, global_scale = rows.get("input_order"), rows.get("global_scale")
        if order is not None:
            order = experts.shared_order(order)
        return StoredWeight(
            codes=codes,
            scales=scales,
            biases=rows.get("biases"),
            group_size=group_size,
            bits=bits,
            mode=FLOATING[group_size] if scales.dtype == mx.uint8 else mode,
            global_scale=None if global_scale is None else global_scale.reshape(-1),
            input_order=order,
        )

    def _widths(self, layer: str, codes: mx.array, scales: mx.array) -> tuple[int, int]:
        """Returns bits and group size of a layer, which the model's k implies.

        Raises:
            ValueError: If no layer of the checkpoint is stored so.
        """
        k, words, groups = self._columns(layer), codes.shape[-1], scales.shape[-1]
        for bits, group_size in self._stored_widths:
            if words * 32 == k * bits and groups * group_size == k:
                return bits, group_size
        raise ValueError(
            f"{self.path}: tensor {layer + '.weight'!r} has {words} words and {groups} "
            f"scales in a row of k={k}, expected those of (bits, group size) in "
            f"{sorted(self._stored_widths)}"
        )

    def _columns(self, name: str) -> int:
        weight = getattr(self.layer(name), "weight", None)
        if weight is None:
            raise ValueError(
                f"{self.path}: tensor {name + '.weight'!r} has no layer in mlx-lm's "
                f"{type(self.model).__module__}"
            )
        return int(weight.shape[-1])

    def copy_other_files(self, folder: Path) -> None:
        """Copies the tokenizer, the licence and whatever else is in the folder.

        Raises:
            OSError: If a file cannot be copied.
            ValueError: If a file is a link that leads out of the checkpoint.
        """
        for file in sorted(self.path.iterdir()):
            if file.is_file() and not any(map(file.match, WEIGHT_FILES)):
                copy_within(file, folder / file.name)


@contextmanager
def _no_dequantizing(method: str) -> Iterator[None]:
    """Makes `mx.dequantize` raise a ValueError, unless weights are quantized as in MLX.

    Some models of mlx-lm divide a quantized weight (DeepSeek's `kv_b_proj`): they
    decode it as MLX's affine mode and quantize it again. Zero points would be taken for
    biases. Calls of other threads are not affected.
    """
    if method in ("", "mlx"):
        yield
        return
    own = threading.get_ident()
    with _replacing:
        original = mx.dequantize

        def refuse(*args: Any, **options: Any) -> mx.array:
            if threading.get_ident() == own:
                raise ValueError("it would quantize a weight again")
            return original(*args, **options)

        mx.dequantize = refuse
        try:
            yield
        finally:
            mx.dequantize = original


def _plain_dtype(arrays: dict[str, mx.array]) -> mx.Dtype | None:
    """Returns the dtype of 16 bits that all plain weights have; None if none is so."""
    layers = {name.rpartition(".")[0] for name in arrays if name.endswith(".scales")}
    plain = (a for name, a in arrays.items() if name.rpartition(".")[0] not in layers)
    found = {array.dtype for array in plain}.intersection(NARROW)
    return found.pop() if len(found) == 1 else None


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


def _are_equal(own: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return own.keys() == other.keys() and all(
        bool(mx.array_equal(array, other[part])) for part, array in own.items()
    )


def _rows(layer: str, weight: StoredWeight) -> dict[str, mx.array]:
    """Returns the arrays of a quantized layer by their names."""
    biases = weight.biases
    if biases is None and weight.mode == "symmetric" and ".experts." in layer:
        # Experts are stacked, and others of them may have zero points.
        biases = mx.full(weight.scales.shape, 2 ** (weight.bits - 1))
        biases = biases.astype(weight.scales.dtype)
    parts = (weight.codes, weight.scales, biases, weight.global_scale)
    named = zip(ROWS, (*parts, weight.input_order), strict=True)
    return {f"{layer}.{part}": array for part, array in named if array is not None}
