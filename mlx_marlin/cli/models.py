"""The models and the clock of commands."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin.checkpoints.location import check_name
from mlx_marlin.cli import output
from mlx_marlin.cli.arguments import BOTH
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import LAYOUTS

if TYPE_CHECKING:
    from collections import Counter

    from mlx_marlin.measure.clocks import Clock


def load(name: str, *, lazy: bool = False) -> tuple[Any, Any]:
    """Loads a model and its tokenizer, with mlx-lm if it can read the weights.

    `name`: a folder, a GGUF file, or a repository on the Hugging Face Hub.
    `lazy`: whether to read the weights only when they are used.
    """
    check_name(name)
    import mlx_lm  # here, because it takes seconds

    from mlx_marlin.lm.checkpoints import loading

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
    """Looks for a model before anything is imported that takes seconds, and says so."""
    is_remote = check_name(name)
    where = "from the Hugging Face Hub, it is not on this machine" if is_remote else ""
    output.print_note(f"loading {name} {where}".rstrip())


def downloaded(name: str) -> Path:
    """Returns a model's folder or file, which is downloaded if it is not here."""
    if check_name(name):
        check(name)
    if Path(name).exists():
        return Path(name)
    from mlx_lm.utils import _download

    try:
        return _download(name)
    except Exception as error:  # of the hub's client, of many kinds
        raise ValueError(f"cannot download the model {name!r}: {error}") from error


def clock(seconds: float) -> "Clock":
    """Returns the clock of this machine."""
    from mlx_marlin.backends import devices, measured_results, selection
    from mlx_marlin.measure import clocks
    from mlx_marlin.products import this_machine

    if measured_results.stands_for_another(selection.backend()):
        raise ValueError(
            f"{devices.ENVIRONMENT} selects a device to plan for, but this command "
            f"measures this machine: unset it"
        )
    return clocks.clock_of(this_machine.device(), seconds)


def load_lazily(name: str) -> Any:
    """Returns a model whose weights are read when they are used."""
    return load(name, lazy=True)[0]


def products(name: str, layouts: Sequence[str]) -> "tuple[Counter[Problem], int]":
    """Returns the products of a model's layers, whose weights are not read."""
    from mlx_marlin.lm.race import model_products

    counts, others = model_products.single_products(load_lazily(name), layouts)
    if not counts:
        raise ValueError(
            f"the model {name!r} has no quantized linear layer in a format that our "
            f"kernels read; mlx_lm.convert -q makes them"
        )
    return counts, others


def problems(
    name: str, counts: Sequence[int], layout: str | None = None
) -> list[Problem]:
    """Returns the problems of a model's layers."""
    found, _ = products(name, layouts(layout))
    return [replace(each, m=m) for each in found for m in counts]


def layouts(asked: str | None) -> tuple[str, ...]:
    """Returns the layouts of `--layout`; that of `optimize` if it is not given."""
    from mlx_marlin.backends import selection

    if asked == BOTH:
        return LAYOUTS
    return (asked or selection.traits().default_layout,)
