"""Sets `MLX_MAX_OPS_PER_BUFFER` as tuning found it, before MLX is imported."""

import os
from collections.abc import Sequence

from mlx_marlin import decision_log
from mlx_marlin.lm.tuned_models import machine, results
from mlx_marlin.lm.tuned_models.model_key import key_of_model_name
from mlx_marlin.lm.tuned_models.results import TunedModel

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
CHOICES = {
    "MLX_MARLIN_BACKEND": "another back end than this machine's may run",
    "MLX_MARLIN_DEVICE": "plans are made for another machine",
    "MLX_MARLIN_OPTIONS": "optimize has other options than those that were measured",
}
"""Variables with which the value is not set, and why."""


def set_for_model(arguments: Sequence[str]) -> None:
    """Sets the variable for the model that a command's arguments name.

    It is set if tuning found a value for the model on this machine, `MLX_MARLIN_TUNED`
    is not 0, and the user has set neither it nor one of `CHOICES`.
    """
    off = os.environ.get("MLX_MARLIN_TUNED") == "0" or not results.folder().is_dir()
    if off or any(os.environ.get(name) for name in (VARIABLE, *CHOICES)):
        return
    name = model_of(arguments)
    found = None if name is None else _found(name)
    if found is not None and found.max_ops_per_buffer is not None:
        os.environ[VARIABLE] = str(found.max_ops_per_buffer)
        decision_log.tuned(found.model, f"{VARIABLE}={found.max_ops_per_buffer}")


def model_of(arguments: Sequence[str]) -> str | None:
    """Returns the value of the last `--model`, as argparse would."""
    found = None
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option != "--model":
            continue
        found = value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def _found(name: str) -> TunedModel | None:
    key = key_of_model_name(name)
    return None if key is None else results.find_by_config(machine.here(), key)
