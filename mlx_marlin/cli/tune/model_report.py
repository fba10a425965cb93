"""The output of the last step of `mlx-marlin tune MODEL`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlx_marlin.lm.model_tuning import environment
from mlx_marlin.lm.model_tuning.comparison import MARGIN, Comparison, line
from mlx_marlin.lm.model_tuning.environment import Values
from mlx_marlin.lm.tuned_models.results import TunedModel
from mlx_marlin.lm.tuned_models.settings import ModelSettings, name_of
from mlx_marlin.tables import aligned

NOTHING_COMPARED = (
    "nothing is kept: no settings could be compared with stock MLX, for the reasons "
    "above"
)


def settings(
    name: str,
    streams: Sequence[int],
    measured: Iterable[Comparison],
    skipped: Iterable[ModelSettings],
) -> str:
    """Returns the table of the speeds of settings relative to stock MLX."""
    rows = [_row(streams, line(each)) for each in measured]
    rows += [_row(streams, [name_of(each), "no time"]) for each in skipped]
    title = f"{name}: speed relative to stock MLX, by streams"
    return f"{title}\n{_table(streams, rows)}"


def values(streams: Sequence[int], tried: Values) -> str:
    """Returns the table of the speeds of values of MLX's variable."""
    if not tried.comparisons:
        reason = tried.failure or "no time"
        return f"{environment.VARIABLE}: not measured, {reason}"
    rows = [
        _row(streams, [str(value), *line(each)[1:]])
        for value, each in tried.comparisons.items()
    ]
    title = f"{environment.VARIABLE}: speed relative to MLX's own value, by streams"
    return f"{title}\n{_table(streams, rows)}"


def conclusion(result: TunedModel, file: Path) -> str:
    """Returns what `optimize` does from now on, and the file that keeps it."""
    chosen = f"optimize(model) uses {name_of(result.settings)} from now on"
    if result.settings is None:
        chosen = "optimize(model) leaves such models to stock MLX from now on"
    rule = f"the defaults stay unless others are {MARGIN:.0%} faster than stock MLX"
    lines = [chosen, rule]
    if result.max_ops_per_buffer is not None:
        variable = f"{environment.VARIABLE}={result.max_ops_per_buffer}"
        lines.append(
            f"{variable} is faster: `mlx-marlin lm` sets it; elsewhere, set it "
            f"before MLX starts"
        )
    return "\n".join([*lines, f"kept in {file}"])


def _row(streams: Sequence[int], cells: Sequence[str]) -> list[str]:
    head, *speeds, verdict = cells
    return [head, *(speeds or [""] * len(streams)), verdict]


def _table(streams: Sequence[int], rows: Sequence[list[str]]) -> str:
    return aligned([["", *map(str, streams), ""], *rows])
