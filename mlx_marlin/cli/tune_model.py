"""The last step of `mlx-marlin tune MODEL`: the race of settings of `optimize`."""

import argparse
import math
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_marlin import progress, state, tables
from mlx_marlin.cli import arguments, models
from mlx_marlin.lm import measured_models
from mlx_marlin.lm.measured_models import VARIABLE, MeasuredModel
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.lm.race.settings import (
    MARGIN,
    Comparison,
    Search,
    basic_settings,
    name_of,
)
from mlx_marlin.tables import Table, Value

if TYPE_CHECKING:
    from mlx_marlin.lm.race.settings_race import Values

ROWS = (1, 4, 8)
"""Numbers of streams, and so of rows, with which settings are compared by default."""
MAX_STREAMS = 64
"""Largest number of --streams."""
MINUTES = 30.0
"""Default of --max-minutes."""
NOT_MEASURED = "the settings of `optimize` are not measured"
NOTHING_COMPARED = (
    "nothing is kept: no settings could be compared with stock MLX, for the reasons "
    "above"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this step."""
    group = parser.add_argument_group(
        "settings of optimize", "compared by forward passes of each model, on a GPU"
    )
    group.add_argument(
        "--no-model",
        action="store_true",
        help="measure the products of models only",
    )
    arguments.add_streams(group, ROWS)
    group.add_argument(
        "--max-minutes",
        type=float,
        default=MINUTES,
        help=f"try no further settings after so long; default: {MINUTES:g}",
    )


def streams(args: argparse.Namespace) -> Sequence[int]:
    """Returns the numbers of streams."""
    arguments.check_range("--max-minutes", args.max_minutes, 1e-9, math.inf)
    return arguments.streams(args, ROWS, MAX_STREAMS)


def tune(name: str, rows: Sequence[int], minutes: float) -> None:
    """Finds the fastest settings of a model, prints them and keeps them.

    Nothing is kept if it is interrupted, or if no settings could be compared.
    """
    if reason := measured_models.why_not_measured():
        print(f"{name}: {NOT_MEASURED}: {reason}")
        return
    ended = monotonic() + minutes * 60
    key, search = _searched(name, rows, ended)
    progress.print_above(tables.printed(_settings_table(name, rows, search)))
    if all(each.excluded for each in search.measured.values()):
        print(NOTHING_COMPARED)  # which says nothing about speed
        return
    values = _values(name, rows, search, ended)
    progress.print_above(_values_text(rows, values))
    result = _result(name, key, search, values)
    file = measured_models.keep(result)
    state.reset()
    print(_conclusion(result, file))


def dry_run(name: str, rows: Sequence[int]) -> str:
    """Returns which settings of a model would be compared."""
    if reason := measured_models.why_not_measured():
        return f"{name}: {NOT_MEASURED}: {reason}"
    basic = "; ".join(map(str, basic_settings()))
    return (
        f"{name}: passes of {arguments.listed(rows)} rows with {basic}; then each of "
        f"the fusions {', '.join(FUSIONS)}, and the best of them together"
    )


def _searched(name: str, rows: Sequence[int], ended: float) -> tuple[str, Search]:
    """Returns the key of a model and a finished search; the model is freed."""
    from mlx_marlin.lm.race.settings_race import Arms  # it imports mlx-lm

    arms = Arms(load=partial(models.load_lazily, name), rows=rows)
    layouts = arms.layouts()
    if len(layouts) == 1:
        print(f"{name}: packed weights not measured: two copies do not fit the memory")
    search = Search(layouts=layouts, is_over=lambda: monotonic() >= ended)
    steps = search.run(arms.compare)
    for _ in progress.shown(steps, "race", "settings", search.steps):
        pass
    return measured_models.model_key(arms.stock), search


def _values(name: str, rows: Sequence[int], search: Search, ended: float) -> "Values":
    """Tries the values of MLX's variable with the settings that were found."""
    from mlx_marlin.lm.race import settings_race

    settings_race.free_memory()  # the processes load the model themselves
    job = settings_race.Job(
        load=partial(models.load_lazily, name),
        settings=search.result.settings if search.result else None,
        rows=rows,
    )
    values = settings_race.Values(
        job=job, measure=settings_race.measure, is_over=lambda: monotonic() >= ended
    )
    total = 2 * (1 + len(settings_race.VALUES))
    for _ in progress.shown(values.run(), VARIABLE, "process", total):
        pass
    return values


def _result(name: str, key: str, search: Search, values: "Values") -> MeasuredModel:
    speedups = search.result.speedups if search.result else {}
    return MeasuredModel(
        model=measured_models.name_of_model(name),
        key=key,
        settings=search.result.settings if search.result else None,
        speedups={m: round(each, 4) for m, each in speedups.items()},
        max_ops_per_buffer=values.best,
        date=date.today().isoformat(),
    )


def _settings_table(name: str, rows: Sequence[int], search: Search) -> Table:
    """Returns the table of the speeds of settings relative to stock MLX."""
    found: list[tuple[Any, Comparison | None]] = [
        *((each.settings, each) for each in search.measured.values()),
        *((each, None) for each in search.skipped),
    ]
    lines = [_line("settings", name_of(each), rows, speeds) for each, speeds in found]
    title = f"{name}: speed relative to stock MLX, by rows of a forward pass"
    return Table(title=title, rows=lines)


def _values_text(rows: Sequence[int], tried: "Values") -> str:
    """Returns the table of the speeds of values of MLX's variable."""
    if not tried.comparisons:
        return f"{VARIABLE}: not measured, {tried.failure or 'no time'}"
    found = tried.comparisons.items()
    lines = [_line("value", str(value), rows, each) for value, each in found]
    title = f"{VARIABLE}: speed relative to MLX's own value, by rows"
    return tables.printed(Table(title=title, rows=lines))


def _line(
    column: str, name: str, rows: Sequence[int], found: Comparison | None
) -> dict[str, Value]:
    speeds = {} if found is None else found.speedups
    return {
        column: name,
        **{str(m): f"{speeds[m]:.3f}" if m in speeds else None for m in rows},
        "verdict": "no time" if found is None else found.verdict,
    }


def _conclusion(result: MeasuredModel, file: Path) -> str:
    """Returns what `optimize` does from now on, and the file that keeps it."""
    chosen = f"optimize(model) uses {name_of(result.settings)} from now on"
    if result.settings is None:
        chosen = "optimize(model) leaves such models to stock MLX from now on"
    rule = f"the defaults stay unless others are {MARGIN:.0%} faster than stock MLX"
    lines = [chosen, rule]
    if result.max_ops_per_buffer is not None:
        lines.append(
            f"{VARIABLE}={result.max_ops_per_buffer} is faster: `mlx-marlin lm` sets "
            f"it; elsewhere, set it before MLX starts"
        )
    return "\n".join([*lines, f"kept in {file}"])
