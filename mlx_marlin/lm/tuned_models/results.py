"""Reads and writes the settings that tuning found for models, one file each.

A file is named after the chip and the model's shape. If it was written with another
system, MLX, mlx-lm, version of this package or kernels, or is not valid, it is ignored
with one warning.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlx_marlin import cache, regular_files
from mlx_marlin.lm.tuned_models import settings
from mlx_marlin.lm.tuned_models.machine import ModelMachine
from mlx_marlin.lm.tuned_models.settings import ModelSettings
from mlx_marlin.lm.warn_once import warn_once
from mlx_marlin.planning.measurement import is_positive

FOLDER = "models"
"""Name of the folder in the cache."""
Speedups = Mapping[int, float]
"""Number of streams -> stock MLX's time of a step over that of the settings."""
MOST_OPERATIONS = 100_000
"""Upper limit of a stored `MLX_MAX_OPS_PER_BUFFER`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """What tuning found for models of one shape."""

    model: str  # Name of the model that was measured
    key: str  # Digest of the model's shape (`model_key`)
    config: str  # Digest of its `config.json`, or ""
    settings: ModelSettings | None  # The settings to use; None for stock MLX
    speedups: Speedups  # The speed of the settings relative to stock MLX
    # The value of `MLX_MAX_OPS_PER_BUFFER` that was faster than MLX's own, or None
    max_ops_per_buffer: int | None
    date: str  # Date of the measurement, ISO 8601

    def __post_init__(self) -> None:
        for name in ("model", "key", "config", "date"):
            if type(value := getattr(self, name)) is not str:
                raise ValueError(f"{name}={value!r}, expected a text")
        for streams, speedup in self.speedups.items():
            if not is_positive(speedup):
                raise ValueError(f"speedups[{streams}]={speedup!r}, expected a factor")
        value = self.max_ops_per_buffer
        if value is not None and (
            type(value) is not int or not 0 < value <= MOST_OPERATIONS
        ):
            raise ValueError(f"max_ops_per_buffer={value!r}, expected a number")

    @property
    def reason(self) -> str:
        """Where the settings come from, with the measured speed."""
        if self.settings is None:
            return f"measured here on {self.date}: stock MLX is faster"
        speeds = ", ".join(
            f"{speedup:.2f} times stock MLX at {streams}"
            for streams, speedup in self.speedups.items()
        )
        return f"measured here on {self.date}: {speeds} streams"


def folder() -> Path:
    """Returns the folder of the results; it may not exist."""
    return cache.folder(FOLDER)


def file_name(machine: ModelMachine, key: str) -> str:
    """Returns the name of the file for a machine and a model's key."""
    return f"{machine.slug}-{key}.json"


def find(machine: ModelMachine, key: str) -> TunedModel | None:
    """Returns what was found for a model's key on a machine, or None."""
    path = folder() / file_name(machine, key)
    return _read(path, machine) if os.path.isfile(path) else None


def find_by_config(machine: ModelMachine, config: str) -> TunedModel | None:
    """Returns what was found for a model's config on a machine, or None.

    Files of other models are not judged. Of this one there may be older files, which
    count only if there is no other: a new version of mlx-lm may change the key.
    """
    files = sorted(folder().glob(f"{machine.slug}-*.json"))
    found = {
        path: _result_or_reason(path, machine)
        for path in files
        if _config(path) == config
    }
    results = (each for each in found.values() if isinstance(each, TunedModel))
    result = next(results, None)
    if result is None:
        for path, reason in found.items():
            _warn(path, str(reason))
    return result


def listed(machine: ModelMachine) -> Iterator[tuple[str, TunedModel | None]]:
    """Yields the names of all files, and what they hold for a machine, or None."""
    for path in sorted(folder().glob("*.json")):
        is_here = path.name.startswith(f"{machine.slug}-")
        yield path.name, _read(path, machine) if is_here else None


def write(machine: ModelMachine, result: TunedModel) -> Path:
    """Keeps a result, which replaces an older one for the same model; atomic."""
    row = {
        "machine": asdict(machine),
        **{field.name: getattr(result, field.name) for field in fields(result)},
        "settings": settings.row(result.settings),
        "speedups": {str(n): round(each, 4) for n, each in result.speedups.items()},
    }
    content = (json.dumps(row, indent=1) + "\n").encode()
    return cache.write(folder(), file_name(machine, result.key), content)


def clear() -> int:
    """Removes the results of all models and machines; returns the number of files."""
    if not os.path.lexists(folder()):
        return 0
    return cache.clear(folder(), "*.json")


def _read(path: Path, machine: ModelMachine) -> TunedModel | None:
    """Returns what a file holds for a machine; None, with a warning, if nothing."""
    found = _result_or_reason(path, machine)
    if isinstance(found, TunedModel):
        return found
    _warn(path, found)
    return None


def _result_or_reason(path: Path, machine: ModelMachine) -> TunedModel | str:
    """Returns what a file holds for a machine, or why that is nothing."""
    try:
        data = cache.read_json(path)
        with regular_files.decoding():
            result, written_on = _decoded(data)
            if path.name != file_name(written_on, result.key):
                raise ValueError("it belongs to another machine or model")
    except (OSError, ValueError) as error:
        return str(error)
    return _differences(written_on, machine) or result


def _config(path: Path) -> Any:
    """Returns the digest of the config that a file is for, or None."""
    with suppress(OSError, ValueError):
        data = cache.read_json(path)
        with regular_files.decoding():
            return data["config"]
    return None


def _decoded(data: Any) -> tuple[TunedModel, ModelMachine]:
    machine = ModelMachine(**data.pop("machine"))
    found = settings.settings_of(data.pop("settings"))
    speedups = {int(n): each for n, each in data.pop("speedups").items()}
    return TunedModel(**data, settings=found, speedups=speedups), machine


def _differences(written: ModelMachine, here: ModelMachine) -> str:
    before, now = asdict(written), asdict(here)
    return ", ".join(
        f"measured with {name} {value}, here {now[name]}"
        for name, value in before.items()
        if value != now[name]
    )


def _warn(path: Path, reason: str) -> None:
    warn_once(
        f"tuned model {path}",
        f"the measured settings in {path} are ignored: {reason}; "
        f"`mlx-marlin tune MODEL` measures them again",
    )
