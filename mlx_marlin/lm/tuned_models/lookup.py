"""Finds the measured settings of a model: what `optimize` without arguments uses."""

import os
from typing import TYPE_CHECKING

from mlx_marlin import decision_log
from mlx_marlin.backends import selection, tuned_results
from mlx_marlin.lm.tuned_models import machine, results
from mlx_marlin.lm.tuned_models.model_key import model_key
from mlx_marlin.lm.tuned_models.results import TunedModel
from mlx_marlin.lm.tuned_models.settings import name_of
from mlx_marlin.lm.warn_once import warn_once

if TYPE_CHECKING:
    import mlx.nn as nn


def why_not_tuned() -> str | None:
    """Returns why models are not tuned in this process, or None."""
    backend = selection.backend()
    if backend not in selection.ON_GPU:
        return "there is no GPU here, so nothing is timed and nothing is kept"
    if not selection.traits().tunes_models:
        return "on this back end its defaults are always used"
    if not selection.may_hand_over():
        return f"{selection.ENVIRONMENT} is set, so stock MLX serves no call of ours"
    return None


def find(model: "nn.Module") -> TunedModel | None:
    """Returns the tuned result for a model, or None, and logs it.

    There is none where models are not tuned (`why_not_tuned`), and with
    `MLX_MARLIN_TUNED=0` or `MLX_MARLIN_DEVICE`.
    """
    if (
        os.environ.get(tuned_results.ENVIRONMENT) == "0"
        or not os.path.isdir(results.folder())
        or why_not_tuned() is not None
        or tuned_results.stands_for_another(selection.backend())
    ):
        return None
    key = key_of(model)
    if key is None:
        return None
    found = results.find(machine.here(), key)
    if found:
        decision_log.tuned(found.model, f"{name_of(found.settings)}: {found.reason}")
    return found


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
