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
from mlx_marlin.layers.guarded_parameters import GuardedParameters

INNER = ".linear."
"""What stands between the path of a reordered layer and its parameters."""


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
        ValueError: If the folder exists, or the model has joined layers.
    """
    path = Path(path)
    records = _records(model)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    arrays = {_stored_name(name): array for name, array in parameters.items()}
    with new_folder(path) as folder:
        with Shards(folder, [*arrays], {"format": "mlx"}) as shards:
            for name, array in arrays.items():
                shards.add(name, array)
        write_config(_config(model), records, folder)
        tokenizer.save_pretrained(str(folder))


def _records(model: nn.Module) -> Records:
    records = Records()
    for name, module in model.named_modules():
        layer: Any = module
        if isinstance(layer, GuardedParameters):
            stored = layer.stored()
            packed = layer.packed
            if stored is not None and packed is None:
                raise ValueError(
                    f"{name} is {stored}: call mlx_marlin.restore(model) before saving"
                )
            if packed is not None:
                records.marlin[_stored_name(f"{name}.")[:-1]] = record_of(packed)
                continue
        if hasattr(layer, "bits") and "scales" in layer:
            format = {"group_size": layer.group_size, "bits": layer.bits}
            records.mlx[name] = {**format, "mode": layer.mode}
    return records


def _stored_name(name: str) -> str:
    """Returns the name in a checkpoint: a reordered layer's is one level less deep."""
    return name.replace(INNER, ".")


def _config(model: Any) -> dict[str, Any]:
    """Returns what config.json says about the architecture.

    Raises:
        ValueError: If the model does not keep its arguments.
    """
    arguments = getattr(model, "args", None)
    if not dataclasses.is_dataclass(arguments) or isinstance(arguments, type):
        raise ValueError(
            f"{type(model).__name__} has no args, expected a model of mlx-lm's"
        )
    return dataclasses.asdict(arguments)
