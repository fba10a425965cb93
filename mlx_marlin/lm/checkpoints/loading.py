"""Loads a model from any checkpoint that this package reads."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_marlin import decision_log
from mlx_marlin.checkpoints.folder import check_sizes, naming, new_model, read_json
from mlx_marlin.checkpoints.formats import marlin_folder
from mlx_marlin.checkpoints.location import check_files, gguf_file
from mlx_marlin.checkpoints.quantization import quantization_of
from mlx_marlin.checkpoints.settings import (
    AUTO_ROUND,
    METHODS,
    SEPARATE_FILES,
    in_config,
)
from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight, mlx_target
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints.folder_source import FolderSource
from mlx_marlin.lm.checkpoints.gguf_source import GgufSource, open_source
from mlx_marlin.lm.checkpoints.head_folder import head_of
from mlx_marlin.lm.checkpoints.model_source import NARROW, ModelSource
from mlx_marlin.lm.known_layers import is_plain_heads, marlin_experts, marlin_heads
from mlx_marlin.lm.layer_conversion import keep_on_stock
from mlx_marlin.regular_files import short
from mlx_marlin.weights.formats import MODE_DEFAULTS, format_of

Weight = StoredWeight | PackedLayer

CONFIG = "_config_of_checkpoint"
"""Attribute of a loaded model: its config.json, which `save` writes again."""
FOLDER = "_folder_of_checkpoint"
"""Attribute of a loaded model: where its head may be."""


def load(
    path: str | Path, *, lazy: bool = False, requantize: int | None = None
) -> tuple[nn.Module, Any]:
    """Loads a model and its tokenizer, as `mlx_lm.load` does.

    Layers in a format of MLX's become MLX's own, which `optimize` converts. Layers in
    other formats are packed, exactly, and run on our kernels.

    Args:
        path: A folder in a format of docs/import.md, one that
            `mlx-marlin convert` made, or a GGUF file.
        lazy: Whether arrays are read only when they are used.
        requantize: Bits of affine codes, in groups of 64, that weights of a GGUF file
            get if their type has no kernels, such as IQ2_XS: each is decoded once and
            quantized anew. Default: such a file is refused.

    Returns:
        The model and its tokenizer.

    Raises:
        ImportError: If mlx-lm is not installed, or `requantize` needs the package
            `gguf`, which is not.
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is malformed, mlx-lm has no such model, or a weight cannot
            be represented exactly.
    """
    source = open_source(path, quantization_of(requantize))
    model = load_model(source)
    if head_of(source.path, model) is not None:
        decision_log.tell(
            f"{source.path} has a head, which drafts: load_heads('auto', model)"
        )
    if not lazy:
        mx.eval(model.parameters())
    return model, _tokenizer(source)


def needs_import(path: Path) -> bool:
    """Returns whether mlx-lm cannot read a model exactly, so that `load` has to."""
    if any((path / file).exists() for file in SEPARATE_FILES):
        return True
    if gguf_file(path) is not None:
        return True
    if not (path / "config.json").exists():
        return False
    check_files(path)
    config = read_json(path / "config.json")
    shapes = check_sizes(path, config)
    if "mlx_marlin" in config:
        return True
    place, settings = in_config(config)
    if not isinstance(settings, dict):
        return False
    if place == "quantization":
        _check_groups(path, config, shapes)
        return settings.get("mode") == "nvfp4"  # perhaps with global scales
    method = settings.get("quant_method", settings.get("method"))
    return isinstance(method, str) and method.lower() in (*METHODS, *AUTO_ROUND)


def _check_groups(
    path: Path, config: dict[str, Any], shapes: dict[str, list[int]]
) -> None:
    """Checks the groups of quantized layers: MLX ends the process if k has fewer."""
    try:
        model = new_model(config)
    except Exception:  # of which mlx-lm says more
        return
    for name, layer in model.named_modules():
        groups = shapes.get(f"{name}.scales", [])[-1:]
        k = layer.weight.shape[-1] if "weight" in layer else 0
        if groups and k and (groups[0] == 0 or k % groups[0]):
            raise ValueError(
                f"{path}: tensor {name + '.scales'!r} has {groups[0]} groups in a row, "
                f"and config.json says k={k}"
            )


def load_model(source: ModelSource) -> nn.Module:
    """Returns the model of a checkpoint with its parameters, not evaluated."""
    model = source.model
    plain: list[tuple[str, mx.array]] = []
    embeddings: list[tuple[str, Weight]] = []
    for name, value in source.parameters():
        path = name.removesuffix(".weight")
        module = source.layer(path)
        if isinstance(value, mx.array):
            plain.append((name, value))
        elif isinstance(module, nn.Embedding):
            embeddings.append((path, value))
        elif module is not None and not hasattr(module, "to_quantized"):
            plain.append((name, _decoded(value)))  # such as DeepSeek's routers
        else:
            with naming(source.path, name):
                layer = _layer(module, value)
            model.update_modules(tree_unflatten([(path, layer)]))
    for path, value in embeddings:
        with naming(source.path, f"{path}.weight"):
            layer = _embedding(source.layer(path), value, path, _dtype(plain))
        model.update_modules(tree_unflatten([(path, layer)]))
    # Not strict: `parameters` has compared names, and the others are set already.
    moved = [(_moved(source, name), array) for name, array in plain]
    model.load_weights(moved, strict=False)
    model.eval()
    # As an entry of the module, a dict would count as parameters.
    object.__setattr__(model, CONFIG, source.config)
    object.__setattr__(model, FOLDER, source.path)
    stays = marlin_folder.stock_layers_of(source.config, source.path)
    if stays:
        with naming(source.path, "config.json: stock_layers"):
            keep_on_stock(model, stays)
    return model


def check_written(folder: Path, destination: Path) -> None:
    """Opens a folder as its readers do, before it gets its name; reads no weights."""
    from mlx_lm import utils

    source = FolderSource(folder, check_values=False)
    try:
        with warnings.catch_warnings(action="ignore"):  # which were given before
            load_model(source)
        if source.computed:
            raise ValueError(
                f"tensors {[*source.computed][:3]} are not what mlx-lm would read: "
                f"its {type(source.model).__module__} changes plain ones as it loads "
                f"them, and does so with codes; leave them plain, or write "
                f"layout='marlin'"
            )
        if "mlx_marlin" not in source.config:
            utils.load_model(folder, lazy=True)
    except MemoryError:
        raise
    except Exception as error:  # of any kind: what mlx-lm raises
        message = short(str(error).replace(f"{folder}: ", ""))
        raise ValueError(
            f"{destination}: what was written cannot be loaded: {message}"
        ) from error


def _dtype(plain: list[tuple[str, mx.array]]) -> mx.Dtype:
    """Returns the dtype of a model: the first of its plain parameters with 16 bits."""
    found = (array.dtype for _, array in plain if array.dtype in NARROW)
    return next(found, mx.float32)


def _layer(module: Any, value: Weight) -> nn.Module:
    """Returns the layer that computes with a quantized weight."""
    if isinstance(value, StoredWeight) and is_of_mlx(value):
        return _stock_layer(module, value)
    packed = value.packed()
    bias = module["bias"] if module is not None and "bias" in module else None
    layer: Any
    if type(module) is nn.Linear:
        layer = MarlinLinear.from_packed(packed, bias)
    elif packed.batch and hasattr(module, "num_experts"):
        layer = marlin_experts().from_packed(packed, bias)
    elif packed.batch and is_plain_heads(module):
        layer = marlin_heads().from_packed(packed)
    else:
        raise ValueError(
            f"{type(module).__name__}, expected a layer that is linear, or of experts, "
            f"or of heads"
        )
    order = value.input_order
    return layer if order is None else ReorderedLinear(layer, order)


def _decoded(value: Weight) -> mx.array:
    """Returns the weight of a layer that cannot be quantized, exactly, in float32."""
    return (value.stored() if isinstance(value, PackedLayer) else value).values()


def is_of_mlx(value: StoredWeight) -> bool:
    """Returns whether MLX's own layer has this format."""
    return (
        value.mode in MODE_DEFAULTS
        and value.input_order is None
        and (value.global_scale is None or len(value.shape) == 3)
        and value.group_size in format_of(value.mode, value.bits).group_sizes
    )


def _stock_layer(module: Any, value: StoredWeight) -> nn.Module:
    if not hasattr(module, "to_quantized"):
        raise ValueError(f"{type(module).__name__} cannot be quantized in mlx-lm")
    format = {"group_size": value.group_size, "bits": value.bits, "mode": value.mode}
    layer: nn.Module = module.to_quantized(**format)
    layer.weight, layer.scales = value.codes, value.scales
    if value.biases is not None:
        layer.biases = value.biases
    if value.global_scale is not None:
        layer.global_scale = value.global_scale
    return layer


def _embedding(
    module: nn.Embedding, value: Weight, path: str, dtype: mx.Dtype
) -> nn.Module:
    """Returns an embedding, which looks up rows that are exactly those of the weight.

    It is MLX's own if MLX has the format. Rows of other formats are rounded to a dtype
    as they are looked up, or not at all if its range is too small.
    """
    stored = value.stored() if isinstance(value, PackedLayer) else value
    if stored.input_order is not None:
        raise ValueError("an embedding with act-order, expected columns in order")
    if not format_of(stored.mode, stored.bits).has_super_blocks:
        try:
            written = mlx_target(stored)
        except ValueError:
            written = None
        if written is not None and written.error == 0:
            layer: nn.Module = module.to_quantized(**written.record)
            for name, array in written.arrays.items():
                setattr(layer, name, array)
            return layer
    fitting = dtype if _largest(stored) <= mx.finfo(dtype).max else mx.float32
    return PackedEmbedding.from_packed(value.packed(), fitting)


def _largest(stored: StoredWeight) -> float:
    """Returns a bound of the magnitudes of a weight."""
    plain = stored.with_float_scales()
    largest = mx.abs(plain.scales.astype(mx.float32)).max()
    if plain.codebook is None:
        largest = largest * 2.0**stored.bits
    else:
        largest = largest * mx.abs(plain.codebook).max()
    if plain.mode == "affine" and plain.biases is not None:
        largest = largest + mx.abs(plain.biases.astype(mx.float32)).max()
    return float(cast(float, largest.item()))


def _moved(source: ModelSource, name: str) -> str:
    """Returns a parameter's name: a reordered layer has its bias one level deeper."""
    layer, _, part = name.rpartition(".")
    is_inner = part == "bias" and isinstance(source.layer(layer), ReorderedLinear)
    return f"{layer}.linear.bias" if is_inner else name


def _tokenizer(source: ModelSource) -> Any:
    from mlx_lm.utils import load_tokenizer

    ends = end_tokens(source)
    with tokenizer_folder(source) as folder:
        try:
            return load_tokenizer(folder, eos_token_ids=ends)  # type: ignore[no-untyped-call]
        except MemoryError:
            raise
        except Exception as error:  # transformers checks config.json too
            raise ValueError(
                f"{source.path}: transformers cannot read the tokenizer or the config: "
                f"{short(str(error))}"
            ) from error


@contextmanager
def tokenizer_folder(source: ModelSource) -> Iterator[Path]:
    """Yields the folder of a model's tokenizer, which is temporary for a GGUF file."""
    if not isinstance(source, GgufSource):
        yield source.path
        return
    with tempfile.TemporaryDirectory() as folder:
        source.copy_other_files(Path(folder))
        yield Path(folder)


def end_tokens(source: ModelSource) -> Any:
    """Returns the tokens that end a text, as mlx-lm does: generation_config.json
    wins."""
    file = source.path / "generation_config.json"
    own = read_json(file).get("eos_token_id") if file.exists() else None
    return own or source.config.get("eos_token_id")
