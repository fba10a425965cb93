"""Arguments that several commands share: mlx-lm models, shapes, numbers of rows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin.checkpoints.location import check_name
from mlx_marlin.cli import terminal
from mlx_marlin.planning.problem import Problem

if TYPE_CHECKING:
    from mlx_marlin.tuning.tuner import Clock

SHAPE = re.compile(r"(?:(\d{1,10})[x,])?(\d{1,10})[x,](\d{1,10})")
"""MxNxK or M,N,K; NxK or N,K for several M."""


def load(name: str, *, lazy: bool = False) -> tuple[Any, Any]:
    """Loads a model and its tokenizer, with mlx-lm if it can read the weights.

    Args:
        name: A folder, a GGUF file, or a repository on the Hugging Face Hub.
        lazy: Whether to read the weights only when they are used.

    Raises:
        ImportError: If mlx-lm cannot be imported.
        OSError: As for `check`.
        ValueError: If the model cannot be loaded.
    """
    check_name(name)
    try:
        import mlx_lm  # here, because it takes seconds

        from mlx_marlin.integrations.mlx_lm.checkpoints import loading
    except ImportError as error:
        raise ImportError(
            f"reading a model needs pip install 'mlx-marlin[lm]': {error}"
        ) from error
    try:
        if loading.needs_import(Path(name)):
            return loading.load(name, lazy=lazy)
        model, tokenizer = mlx_lm.load(name, lazy=lazy)[:2]
    except MemoryError:
        raise
    except Exception as error:  # mlx-lm and transformers raise many kinds
        raise ValueError(f"cannot load the model {name!r}: {error}") from error
    return model, tokenizer


def check(name: str) -> None:
    """Looks for a model before anything is imported that takes seconds, and says so.

    Args:
        name: As for `load`.

    Raises:
        OSError: If there is no such model on this machine, and it cannot be on the
            Hugging Face Hub.
        ValueError: If a file of it cannot be read.
    """
    is_remote = check_name(name)
    where = "from the Hugging Face Hub, it is not on this machine" if is_remote else ""
    terminal.print_note(f"loading {name} {where}".rstrip())


def shape(text: str) -> tuple[int | None, int, int] | None:
    """Returns m, if it is given, n and k of a shape, or None if it is not a shape."""
    found = SHAPE.fullmatch(text)
    if found is None:
        return None
    m, n, k = found.groups()
    return (int(m) if m else None), int(n), int(k)


def product(text: str, option: str = "") -> tuple[int, int, int]:
    """Returns m, n and k of a shape.

    Args:
        text: The shape, such as "8x4096x4096" or "8,4096,4096".
        option: The option that has it, for messages.

    Raises:
        ValueError: If it is not a shape with m.
    """
    found = shape(text)
    if found is None or found[0] is None:
        where = f"{option} {text!r}".strip()
        raise ValueError(f"{where}, expected MxNxK such as 8x4096x4096")
    m, n, k = found
    return m, n, k


def rows(text: str, option: str = "--rows") -> list[int]:
    """Parses numbers of rows, such as "1,4,8".

    Args:
        text: The numbers.
        option: The option that has them, for messages.

    Raises:
        ValueError: If a number is not a positive decimal integer.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r}, expected numbers such as 1,2,4,8")
    return [int(part) for part in parts]


def clock(seconds: float) -> "Clock":
    """Returns the clock of this machine.

    Args:
        seconds: Measuring time of a problem.

    Raises:
        ValueError: If this machine cannot measure.
    """
    from mlx_marlin.backends import devices, selection, tuned_results
    from mlx_marlin.products import eligibility
    from mlx_marlin.tuning import tuner

    if tuned_results.stands_for_another(selection.backend()):
        raise ValueError(
            f"{devices.ENVIRONMENT} selects a device to plan for, but this command "
            f"measures this machine: unset it"
        )
    return tuner.clock(eligibility.target(), seconds)


def problems(
    name: str, counts: Sequence[int], layout: str | None = None
) -> list[Problem]:
    """Returns the problems of a model's layers.

    Args:
        name: As for `load`.
        counts: Rows of the activations.
        layout: Layout of the weights. Default: that which `optimize` uses.

    Raises:
        ValueError: If the model cannot be loaded, or no layer has a supported format.
    """
    from mlx_marlin.backends import selection
    from mlx_marlin.tuning import layers

    layouts = [layout or selection.traits().default_layout]
    found = layers.find(load(name, lazy=True)[0], layouts).problems
    if not found:
        raise ValueError(
            f"the model {name!r} has no quantized linear layer in a format that our "
            f"kernels read"
        )
    return layers.with_rows(found, counts)


def with_dtype(problem: Problem, dtype: str) -> Problem:
    """Returns a problem with another dtype of activations.

    Scales have the dtype of the activations, except those that are integers.
    """
    scales = problem.format.scale_dtype(dtype)
    return replace(problem, dtype=dtype, scale_dtype=scales)


def listed(numbers: Iterable[int]) -> str:
    """Returns numbers separated by commas, as `rows` parses them."""
    return ",".join(map(str, numbers))
