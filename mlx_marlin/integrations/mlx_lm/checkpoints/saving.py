"""Saves a model with packed layers, which mlx-lm cannot save."""

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.checkpoints.new_folder import new_folder
from mlx_marlin.checkpoints.shards import Shards
from mlx_marlin.checkpoints.targets import record_of
from mlx_marlin.integrations.mlx_lm.checkpoints.conversion import Records, write_config
from mlx_marlin.integrations.mlx_lm.stock_layers import stock_layers
from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.native import GLOBAL_SCALE
from mlx_marlin.layers.reordered import ReorderedLinear

CONFIG = "_config_of_checkpoint"
"""Attribute of a loaded model: the settings that its class does not keep."""


def keep_config(model: nn.Module, config: dict[str, Any]) -> None:
    """Keeps the config of a model's checkpoint, which `save` writes again."""
    # As an entry of the module, a dict would count as parameters.
    object.__setattr__(model, CONFIG, config)


def save(path: str | Path, model: nn.Module, tokenizer: Any) -> None:
    """Saves a model of mlx-lm's and its tokenizer as a folder that `load` reads.

    Packed layers keep their bits. A model without packed layers can be read by
    `mlx_lm.load` too. The folder appears when it is complete.

    Args:
        path: The folder to make; it must not exist.
        model: A model that has its arguments as `args`, as mlx-lm's have.
        tokenizer: What `load` returned.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the folder exists, or the model has joined layers, adapters, or
            parts of layers that other machines share.
    """
    path = Path(path)
    _check_layers(model)
    records = _records(model)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    reordered = _reordered(model)
    arrays = {_stored_name(name, reordered): a for name, a in parameters.items()}
    for layer in records.marlin:
        if (scale := f"{layer}.{GLOBAL_SCALE}") in arrays:
            arrays[scale] = arrays[scale][:1]
    with new_folder(path) as folder:
        with Shards(folder, [*arrays], {"format": "mlx"}) as shards:
            for name, array in arrays.items():
                shards.add(name, array)
        write_config(_config(model) | _end_tokens(tokenizer), records, folder)
        tokenizer.save_pretrained(str(folder))


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
        if isinstance(layer, GuardedParameters):
            stored = layer.stored()
            packed = layer.packed
            if stored is not None and packed is None:
                raise ValueError(
                    f"{name} is {stored}: call mlx_marlin.restore(model) before saving"
                )
            if packed is not None:
                records.marlin[
                    _stored_name(f"{name}.words", reordered)[: -len(".words")]
                ] = record_of(packed)
                continue
        if hasattr(layer, "bits") and "scales" in layer:
            format = {"group_size": layer.group_size, "bits": layer.bits}
            records.mlx[name] = {**format, "mode": layer.mode}
            if GLOBAL_SCALE in layer:
                records.mlx[name][GLOBAL_SCALE] = True
    return records


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
    """Returns the config of the model's checkpoint, or else the model's arguments.

    Raises:
        ValueError: If the model does not keep its arguments.
    """
    if (config := vars(model).get(CONFIG)) is not None:
        return dict(config)
    arguments = getattr(model, "args", None)
    if not dataclasses.is_dataclass(arguments) or isinstance(arguments, type):
        raise ValueError(
            f"{type(model).__name__} has no args, expected a model of mlx-lm's"
        )
    return dataclasses.asdict(arguments)
