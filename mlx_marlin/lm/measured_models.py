"""The settings that `tune` found for models: how they are kept, and who uses them.

They are in the file of the machine's results. MLX is not imported here, because
`MLX_MAX_OPS_PER_BUFFER` must be set before it starts.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin import decision_log, regular_files, versions
from mlx_marlin.backends import measured_results, result_files
from mlx_marlin.backends.metal import detection
from mlx_marlin.evidence import codec
from mlx_marlin.lm.race.settings import ModelSettings, name_of
from mlx_marlin.planning.measurement import Machine, is_positive
from mlx_marlin.warn_once import warn_once

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_marlin.planning.device import PlanningDevice

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
CHOICES = {
    "MLX_MARLIN_BACKEND": "another back end than this machine's may run",
    "MLX_MARLIN_DEVICE": "plans are made for another machine",
    "MLX_MARLIN_OPTIONS": "optimize has other options than those that were measured",
}
"""Variables with which the value is not set, and why."""
MOST_OPERATIONS = 100_000
"""Upper limit of a stored `MLX_MAX_OPS_PER_BUFFER`."""
IGNORED = ("path", "name", "transformers_version", "model_file")
"""Settings whose keys contain one of these say nothing about a model's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """What `tune` found for models of one shape."""

    model: str  # Name of the model that was measured (`name_of_model`)
    key: str  # Digest of the model's shape (`model_key`)
    settings: ModelSettings | None  # The settings to use; None for stock MLX
    # Rows of a forward pass -> stock MLX's time over that with the settings
    speedups: dict[int, float]
    # The value of `MLX_MAX_OPS_PER_BUFFER` that was faster than MLX's own, or None
    max_ops_per_buffer: int | None
    date: str  # Date of the measurement, ISO 8601

    def __post_init__(self) -> None:
        for rows, speedup in self.speedups.items():
            if not is_positive(speedup):
                raise ValueError(f"speedups[{rows}]={speedup!r}, expected a factor")
        value = self.max_ops_per_buffer
        if value is not None and not 0 < value <= MOST_OPERATIONS:
            shown = regular_files.quoted(value, 60)
            raise ValueError(f"max_ops_per_buffer={shown}, expected a number")

    @property
    def reason(self) -> str:
        """Where the settings come from, with the measured speed."""
        if self.settings is None:
            return f"measured here on {self.date}: stock MLX is faster"
        speeds = ", ".join(
            f"{speedup:.2f} times stock MLX at {rows}"
            for rows, speedup in self.speedups.items()
        )
        return f"measured here on {self.date}: {speeds} rows"


def why_not_measured() -> str | None:
    """Returns why settings are not measured in this process, or None."""
    from mlx_marlin.backends import selection

    backend = selection.backend()
    if backend not in selection.ON_GPU:
        return "there is no GPU here, so nothing is timed and nothing is kept"
    if not selection.traits().tunes_models:
        return "on this back end its defaults are always used"
    if not selection.may_hand_over():
        return f"{selection.ENVIRONMENT} is set, so stock MLX serves no call of ours"
    return None


def find(model: "nn.Module") -> MeasuredModel | None:
    """Returns the settings that were measured for a model, or None, and logs them.

    There are none where they are not measured (`why_not_measured`), and with
    `MLX_MARLIN_TUNED=0` or `MLX_MARLIN_DEVICE`.
    """
    if why_not_measured() is not None:
        return None
    rows = measured_results.settings(*_target())
    key = key_of(model) if rows else None
    found = next(decoded([rows[key]] if key in rows else [], _file()), None)
    if found is not None:
        decision_log.measured(found.model, f"{name_of(found.settings)}: {found.reason}")
    return found


def decoded(rows: Iterable[Any], file: Path) -> Iterator[MeasuredModel]:
    """Yields what rows of a file encode; warns once of each that is not valid."""
    for row in rows:
        try:
            with regular_files.decoding():
                found: MeasuredModel = codec.decoded(MeasuredModel, row)
        except ValueError as error:
            warn_once(
                f"settings of a model: {error}",
                f"measured settings of a model in {file} are ignored: {error}; "
                f"`mlx-marlin tune MODEL` measures them again",
            )
        else:
            yield found


def keep(found: MeasuredModel) -> Path:
    """Keeps settings, which replace older ones of models of the shape."""
    here = measured_results.machine(*_target())
    row = codec.encoded(found)
    measured_results.keep(result_files.folder(), here, settings=[row])
    return _file()


def _target() -> tuple["PlanningDevice", str]:
    """Returns the device and the back end that results hold for."""
    from mlx_marlin.backends import selection
    from mlx_marlin.products import this_machine

    return this_machine.device(), selection.backend()


def _file() -> Path:
    return result_files.folder() / measured_results.machine(*_target()).file_name


def set_for_model(arguments: Sequence[str]) -> None:
    """Sets the variable for the model that a command's arguments name.

    It is set if `tune` found a value for the model on this machine, `MLX_MARLIN_TUNED`
    is not 0, and the user has set neither it nor one of `CHOICES`.
    """
    off = os.environ.get(measured_results.ENVIRONMENT) == "0"
    if off or any(os.environ.get(name) for name in (VARIABLE, *CHOICES)):
        return
    name = model_of(arguments)
    if name is None or not os.path.isdir(result_files.folder()):
        return
    every = decoded(_rows_before_mlx(), result_files.folder())
    model = name_of_model(name)
    named = (each for each in every if each.model == model)
    found = max(named, key=lambda each: each.date, default=None)
    if found is not None and found.max_ops_per_buffer is not None:
        os.environ[VARIABLE] = str(found.max_ops_per_buffer)
        decision_log.measured(found.model, f"{VARIABLE}={found.max_ops_per_buffer}")


def _rows_before_mlx() -> Iterator[Any]:
    """Yields the settings of models on this machine; MLX is not imported.

    Only MLX knows the architecture, which a chip has one of.
    """
    device = detection.physical(detection.chip_name() or "")
    here = Machine(
        chip=device.name,
        architecture="",
        cores=device.cores,
        system=measured_results.system(),
        mlx=versions.installed("mlx") or "",
        kernels=measured_results.kernels("metal"),
    )
    folder = result_files.folder()
    for each in result_files.machines(folder, here):
        if replace(each, architecture="") == here:
            yield from result_files.read(folder, each).settings.values()


def model_of(arguments: Sequence[str]) -> str | None:
    """Returns the value of the last `--model`, as argparse would."""
    found = None
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option != "--model":
            continue
        found = value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def name_of_model(model: str) -> str:
    """Returns a model's name for results: that of a folder without its path."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def key_of(model: "nn.Module") -> str | None:
    """Returns the key of a model; None, with one warning, if it cannot be read."""
    try:
        return model_key(model)
    except Exception as error:  # it reads settings and layers that are not ours
        warn_once(
            f"no key: {type(error).__name__}: {error}",
            f"what was measured is not used for a model, because its layers or "
            f"settings cannot be read: {type(error).__name__}: {error}",
        )
        return None


def model_key(model: "nn.Module") -> str:
    """Returns a digest of a model's class, settings, formats and dtype.

    It is the same before and after `optimize`, and does not read weights.
    """
    from mlx_marlin.layers.guarded_parameters import activation_dtype

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


def _formats(model: "nn.Module") -> list[str]:
    """Returns how many rows of a weight each format has; joining does not change it."""
    from mlx_marlin.lm.module_tree import computing_layers
    from mlx_marlin.lm.report.layer_uses import has_weight, weight_of

    rows: Counter[str] = Counter()
    for layer in computing_layers(model):
        if has_weight(layer):
            n, k, group_size, bits, mode, batch, _ = weight_of(layer)
            rows[f"{mode} {bits} {group_size} {k}"] += n * prod(batch)
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
