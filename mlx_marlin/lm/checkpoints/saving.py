"""Saves a model with packed layers, which mlx-lm cannot save."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.checkpoints.stored_weight import record_of
from mlx_marlin.checkpoints.writing import Shards, new_folder
from mlx_marlin.layers.guarded_parameters import GLOBAL_SCALE, GuardedParameters
from mlx_marlin.layers.joined import MarlinPart, separate, whole
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints.conversion import Records, write_config
from mlx_marlin.lm.checkpoints.loading import CONFIG, check_written
from mlx_marlin.lm.layer_conversion import stock_layers


def save(path: str | Path, model: nn.Module, tokenizer: Any) -> None:
    """Saves a model of mlx-lm's and its tokenizer as a folder that `load` reads.

    Packed layers keep their bits, and joined ones are written as separate layers. A
    model without packed layers can be read by `mlx_lm.load` too. The folder appears
    when it is complete.

    Args:
        path: The folder to make; it must not exist.
        model: A model that has its arguments as `args`, as mlx-lm's have.
        tokenizer: What `load` returned.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the folder exists, or the model has adapters, or parts of layers
            that other machines share, or the folder cannot be loaded again.
    """
    path = Path(path)
    _check_layers(model)
    records = _records(model)
    arrays = _arrays(model)
    with new_folder(path) as folder:
        with Shards(folder, {"format": "mlx"}) as shards:
            for name, array in arrays.items():
                layer, _, own = name.rpartition(".")
                is_scale = own == GLOBAL_SCALE and layer in records.marlin
                shards.add(name, array()[:1] if is_scale else array())
        write_config(_config(model) | _end_tokens(tokenizer), records, folder)
        tokenizer.save_pretrained(str(folder))
        check_written(folder, path)


def _check_layers(model: nn.Module) -> None:
    """Checks that a model has no layers whose parameters `load` has no place for."""
    for name, layer in model.named_modules():
        if "lora_a" in layer:  # LoRA's and DoRA's layers
            raise ValueError(
                f"{name} is an adapter, {type(layer).__name__}, which the model's "
                f"class does not have: fuse it (`mlx_lm.fuse`), or save the adapters "
                f"alone and call mlx_lm.tuner.utils.remove_lora_layers(model) first"
            )
        group = getattr(layer, "group", None)
        if isinstance(group, mx.distributed.Group) and group.size() > 1:
            raise ValueError(
                f"{name} is one of {group.size()} machines' parts of a layer, expected "
                f"a model that is not sharded"
            )


def _records(model: nn.Module) -> Records:
    records = Records(stock_layers=stock_layers(model))
    reordered = _reordered(model)
    for name, module in model.named_modules():
        layer: Any = module
        if name in reordered and not isinstance(layer, GuardedParameters):
            raise ValueError(
                f"{name} is a layer of MLX with columns in another order than x "
                f"(act-order), which no checkpoint can hold"
            )
        own = whole(layer)
        packed = own.packed if isinstance(own, GuardedParameters) else None
        if packed is not None:
            stored = _stored_name(f"{name}.words", reordered).removesuffix(".words")
            records.marlin[stored] = record_of(packed)
            if isinstance(layer, MarlinPart):
                records.marlin[stored]["n"] = layer.shared.sizes[layer.index]
        elif hasattr(layer, "bits") and "scales" in own:
            format = {"group_size": layer.group_size, "bits": layer.bits}
            records.mlx[name] = {**format, "mode": layer.mode}
            if GLOBAL_SCALE in layer:
                records.mlx[name][GLOBAL_SCALE] = True
    return records


def _arrays(model: nn.Module) -> dict[str, Callable[[], mx.array]]:
    """Returns the arrays of a checkpoint by their names.

    Those of joined layers are separated when they are written, one group at a time.
    """
    separated = lru_cache(maxsize=1)(separate)
    parts = {n: m for n, m in model.named_modules() if isinstance(m, MarlinPart)}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    reordered = _reordered(model)
    found: dict[str, Callable[[], mx.array]] = {
        _stored_name(name, reordered): partial(_itself, array)
        for name, array in parameters.items()
        if name.rpartition(".")[0].removesuffix(".joined") not in parts
    }
    for name, part in sorted(parts.items(), key=lambda each: id(each[1].shared)):
        for own in part.shared.layer:
            found[f"{name}.{own}"] = partial(_own_rows, separated, part, own)
    return found


def _itself(array: mx.array) -> mx.array:
    return array


def _own_rows(separated: Any, part: MarlinPart, name: str) -> mx.array:
    array: mx.array = separated(part.shared)[part.index][name]
    return array


def _reordered(model: nn.Module) -> set[str]:
    """Returns the paths of the inner layers of reordered layers."""
    modules = model.named_modules()
    return {f"{name}.linear" for name, m in modules if isinstance(m, ReorderedLinear)}


def _stored_name(name: str, reordered: set[str]) -> str:
    """Returns the name in a checkpoint: a reordered layer's is one level less deep."""
    layer, _, part = name.rpartition(".")
    return f"{layer.removesuffix('.linear')}.{part}" if layer in reordered else name


def _end_tokens(tokenizer: Any) -> dict[str, list[int]]:
    """Returns the tokens that end a text, which a model's arguments do not hold."""
    ends = getattr(tokenizer, "eos_token_ids", None)
    return {"eos_token_id": sorted(ends)} if ends else {}


def _config(model: Any) -> dict[str, Any]:
    """Returns the config of the model's checkpoint, or else the model's arguments."""
    if (config := vars(model).get(CONFIG)) is not None:
        return dict(config)
    arguments = getattr(model, "args", None)
    if not dataclasses.is_dataclass(arguments) or isinstance(arguments, type):
        raise ValueError(
            f"{type(model).__name__} has no args, expected a model of mlx-lm's"
        )
    return dataclasses.asdict(arguments)
