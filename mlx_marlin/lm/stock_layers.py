"""Layers that stay on stock MLX, because `verify` found an error above its limit."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.folder import read_json
from mlx_marlin.checkpoints.formats.marlin_folder import VERSION, stock_layers_of
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.layer_conversion import (
    STAYS_STOCK,
    is_marlin_layer,
    join_layers,
    replace_layers,
    separate_layers,
)
from mlx_marlin.lm.module_tree import Changes, find_layers, one_at_a_time
from mlx_marlin.regular_files import quoted


@one_at_a_time
def keep_on_stock(model: nn.Module, names: Collection[str]) -> None:
    """Converts layers back to MLX's own, in place, and excludes them from `optimize`.

    Joined layers are separated, and those that can be are joined again. If an error
    occurs, the model is left unchanged.
    """
    with Changes() as changes:
        is_joined = any(isinstance(module, MarlinPart) for module in model.modules())
        separate_layers(model, changes)
        layers = [_quantized_layer(model, name) for name in names]
        wanted = {id(layer) for layer in layers if is_marlin_layer(layer)}
        found = find_layers(model, lambda layer: id(layer) in wanted)
        replace_layers(found, lambda layer: layer.to_stock(), False, changes)
        if is_joined:
            join_layers(model, changes)
    modules = dict(model.named_modules())
    for name in names:
        setattr(_inner(modules[name]), STAYS_STOCK, True)


def stock_layers(model: nn.Module) -> list[str]:
    """Returns the paths of the layers that `keep_on_stock` has converted."""
    named = model.named_modules()
    inner = {id(m.linear) for _, m in named if isinstance(m, ReorderedLinear)}
    return [
        name
        for name, module in named
        if id(module) not in inner and getattr(_inner(module), STAYS_STOCK, False)
    ]


def record_stock_layers(folder: Path, names: Collection[str]) -> None:
    """Adds layers to those that `load` keeps on stock MLX.

    They become `config["mlx_marlin"]["stock_layers"]`. The file is replaced in one
    step, so that it is never incomplete.
    """
    file = folder / "config.json"
    config = read_json(file)
    all_names = dict.fromkeys([*stock_layers_of(config, folder), *names])
    ours = config.get("mlx_marlin") or {"version": VERSION, "layers": {}}
    config["mlx_marlin"] = ours | {"stock_layers": [*all_names]}
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix=".config.", suffix=".json", delete=False
    ) as new:
        try:
            with regular_files.named(new.name):
                new.write(json.dumps(config, indent=1))
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(file, new.name)
            os.replace(new.name, file)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise


def _quantized_layer(model: nn.Module, name: str) -> Any:
    own = _inner(dict(model.named_modules()).get(name))
    if own is None or not (hasattr(own, "bits") or getattr(own, STAYS_STOCK, False)):
        raise ValueError(f"{quoted(name)} is not a quantized layer of the model")
    return own


def _inner(module: Any) -> Any:
    return module.linear if isinstance(module, ReorderedLinear) else module
