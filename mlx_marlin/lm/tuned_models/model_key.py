"""Digests that models of one shape share: of a model, and of its `config.json`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mlx_marlin import regular_files

if TYPE_CHECKING:
    import mlx.nn as nn

CONFIG = "config.json"
IGNORED = ("path", "name", "transformers_version", "model_file")
"""Settings whose keys contain one of these say nothing about a model's shape."""


def model_key(model: "nn.Module") -> str:
    """Returns a digest of a model's class, settings, formats and dtype.

    It is the same before and after `optimize`, and does not read weights.
    """
    from mlx_marlin.layers.native import activation_dtype

    args = getattr(model, "args", None)
    settings = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    kind = type(model)
    described = (
        f"{kind.__module__}.{kind.__qualname__}",
        _shape(settings),
        _formats(model),
        str(activation_dtype(model)),
    )
    return _digest(described)


def config_key(config: Mapping[str, Any]) -> str:
    """Returns a digest of a `config.json` without names and paths."""
    return _digest(_shape(config))


def key_of_model_name(name: str) -> str | None:
    """Returns the digest of the config of a model that is on this machine, or None.

    Neither MLX nor the network is used.
    """
    path = os.path.join(os.path.expanduser(name), CONFIG)
    found = path if os.path.isfile(path) else _downloaded(name)
    with suppress(OSError, ValueError), regular_files.decoding():
        config = json.loads(regular_files.read(found)) if found else None
        return config_key(config) if isinstance(config, dict) else None
    return None


def _downloaded(name: str) -> str | None:
    """Returns the path of the config of a repository that has been downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, CONFIG)
    except (ImportError, ValueError, OSError):
        return None
    return found if isinstance(found, str) else None


def _formats(model: "nn.Module") -> list[str]:
    """Returns how many rows of a weight each format has; joining does not change it."""
    from mlx_marlin.lm.module_tree import computing_layers
    from mlx_marlin.lm.report.layer_groups import (
        has_weight,
        weight_of,
    )

    rows: Counter[str] = Counter()
    for layer in computing_layers(model):
        if has_weight(layer):
            weight = weight_of(layer, "mlx")
            scheme = f"{weight.mode} {weight.bits} {weight.group_size} {weight.k}"
            rows[scheme] += weight.n * prod(weight.batch)
    return sorted(f"{scheme}: {count}" for scheme, count in rows.items())


def _shape(settings: Any) -> Any:
    """Returns nested settings without names and paths."""
    if isinstance(settings, Mapping):
        return {
            str(key): _shape(value)
            for key, value in settings.items()
            if not any(word in str(key).split("_") for word in IGNORED)
            and str(key) not in IGNORED
        }
    if isinstance(settings, list | tuple):
        return [_shape(value) for value in settings]
    return settings


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
