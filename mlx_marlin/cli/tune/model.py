"""The last step of `mlx-marlin tune MODEL`: generations with the model itself."""

import argparse
import math
from collections.abc import Sequence
from datetime import date
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from mlx_marlin import progress, state
from mlx_marlin.cli import arguments, models
from mlx_marlin.lm.fusions import FUSIONS
from mlx_marlin.lm.tuned_models import lookup, machine, model_key, results
from mlx_marlin.lm.tuned_models.results import TunedModel
from mlx_marlin.lm.tuned_models.settings import STREAMS

if TYPE_CHECKING:
    from mlx_marlin.lm.model_tuning.environment import Values
    from mlx_marlin.lm.model_tuning.search import Search

MAX_STREAMS = 64
"""Largest number of --streams."""
MINUTES = 30.0
"""Default of --max-minutes."""
NOT_MEASURED = "the settings of `optimize` are not measured"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this step."""
    group = parser.add_argument_group(
        "settings of optimize", "compared by generating with each model, on a GPU"
    )
    group.add_argument(
        "--no-model",
        action="store_true",
        help="measure the products of models only",
    )
    arguments.add_streams(group, STREAMS)
    group.add_argument(
        "--max-minutes",
        type=float,
        default=MINUTES,
        help=f"try no further settings after so long; default: {MINUTES:g}",
    )


def streams(args: argparse.Namespace) -> list[int]:
    """Returns the numbers of streams."""
    arguments.check_range("--max-minutes", args.max_minutes, 1e-9, math.inf)
    given = args.streams
    found = arguments.numbers(given, "--streams") if given else STREAMS
    for count in found:
        arguments.check_range("--streams", count, 1, MAX_STREAMS)
    return [*dict.fromkeys(found)]


def tune(name: str, counts: Sequence[int], minutes: float) -> None:
    """Finds the fastest settings of a model, prints them and keeps them.

    Nothing is kept if it is interrupted, or if no settings could be compared.
    """
    if reason := lookup.why_not_tuned():
        print(f"{name}: {NOT_MEASURED}: {reason}")
        return
    from mlx_marlin.cli.tune import model_report  # it imports mlx-lm

    ended = monotonic() + minutes * 60
    key, search = _searched(name, counts, ended)
    measured = search.measured.values()
    progress.print_above(model_report.settings(name, counts, measured, search.skipped))
    if all(each.excluded for each in measured):  # which says nothing about speed
        print(model_report.NOTHING_COMPARED)
        return
    values = _values(name, counts, search, ended)
    progress.print_above(model_report.values(counts, values))
    result = _result(name, key, search, values)
    file = results.write(machine.here(), result)
    state.reset()
    print(model_report.conclusion(result, file))


def dry_run(name: str, counts: Sequence[int]) -> str:
    """Returns which settings of a model would be compared."""
    if reason := lookup.why_not_tuned():
        return f"{name}: {NOT_MEASURED}: {reason}"
    from mlx_marlin.lm.model_tuning.search import basic_settings

    basic = "; ".join(map(str, basic_settings()))
    return (
        f"{name}: generation at {arguments.listed(counts)} streams with {basic}; then "
        f"each of the fusions {', '.join(FUSIONS)}, and the best of them together"
    )


def _searched(name: str, counts: Sequence[int], ended: float) -> "tuple[str, Search]":
    """Returns the key of a model and a finished search; the model is freed."""
    from mlx_marlin.lm.model_tuning import search as searching
    from mlx_marlin.lm.model_tuning.generations import Generations

    generations = Generations(load=partial(models.load_lazily, name), streams=counts)
    layouts = generations.layouts()
    if len(layouts) == 1:
        print(f"{name}: packed weights not measured: two copies do not fit the memory")
    search = searching.Search(
        fusions=(*FUSIONS,),
        layouts=layouts,
        is_over=lambda: monotonic() >= ended,
    )
    total = searching.steps(layouts, search.fusions)
    for _ in progress.shown(
        search.run(generations.compare), "generate", "settings", total
    ):
        pass
    return model_key.model_key(generations.stock), search


def _values(
    name: str, counts: Sequence[int], search: "Search", ended: float
) -> "Values":
    """Tries the values of MLX's variable with the settings that were found."""
    from mlx_marlin.lm.model_tuning import environment, generations

    generations.free_memory()  # the processes load the model themselves
    job = environment.Job(
        load=partial(models.load_lazily, name),
        settings=search.result.settings if search.result else None,
        streams=counts,
        prompt=generations.PROMPT,
        new=generations.NEW,
    )
    values = environment.Values(
        job=job, measure=environment.measure, is_over=lambda: monotonic() >= ended
    )
    total = 2 * (1 + len(values.values))
    for _ in progress.shown(values.run(), environment.VARIABLE, "process", total):
        pass
    return values


def _result(name: str, key: str, search: "Search", values: "Values") -> TunedModel:
    from mlx_marlin.lm import generation

    return TunedModel(
        model=generation.name_of(name),
        key=key,
        config=model_key.key_of_model_name(name) or "",
        settings=search.result.settings if search.result else None,
        speedups=search.result.speedups if search.result else {},
        max_ops_per_buffer=values.best,
        date=date.today().isoformat(),
    )
