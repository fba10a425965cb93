"""Plans from fields that a caller gives; the candidates' code knows none of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict

from mlx_marlin.planning.work import decompositions as divide
from mlx_marlin.planning.work.decompositions import TileGrid, WideWork
from mlx_marlin.planning.work.tiles import Kernel, Reduction
from mlx_marlin.planning.work.work import STRATEGIES, Partition, Strategy, Work

CodeForm = Literal["offset", "exact", "least_offset", "bfloat", "half_by_float"]
"""Forms of a code that Metal kernels multiply (docs/design.md)."""

STAGED = ((1, 0), (2, 0), (3, 0), (2, 1))
"""(buffers, loaders) of `gemm_staged` that are listed, measured and compared."""

ACCEPTED: dict[Strategy, frozenset[str]] = {
    "data_parallel": frozenset(),
    "stripe": frozenset({"partition", "k_parallel", "num_threadgroups"}),
    "split_k": frozenset({"k_parallel"}),
    "stream_k": frozenset({"num_threadgroups", "minimum", "groups"}),
    "hybrid": frozenset({"num_threadgroups", "whole", "minimum", "groups"}),
    "hytis": frozenset({"whole", "simdgroups_n"}),
}
"""The plan fields that a caller may give, by strategy."""
WORK_FIELDS = frozenset({"strategy"}).union(*ACCEPTED.values())
"""The plan fields that determine how work is divided."""
GENERATORS: dict[Strategy, Callable[..., Iterator[WideWork]]] = {
    "data_parallel": divide.whole_tiles,
    "stripe": divide.stripes,
    "split_k": divide.slices_of_k,
    "stream_k": divide.streams,
    "hybrid": divide.hybrids,
    "hytis": divide.wide_tiles,
}
"""The generator of divisions of each strategy."""


class PlanOverrides(TypedDict, total=False):
    """Plan fields with given values; the planner chooses the others."""

    kernel: Kernel
    fragments_m: int
    simdgroups_m: int
    simdgroups_n: int
    simdgroups_k: int
    strategy: Strategy
    partition: Partition
    k_parallel: int
    num_threadgroups: int
    whole: int
    minimum: int
    groups: int
    reduction: Reduction
    operand: CodeForm
    buffers: int
    loaders: int


def works(grid: TileGrid, given: Mapping[str, Any]) -> list[WideWork]:
    """Returns the divisions of the work that have the given fields, at least one."""
    fields = {name: given[name] for name in given if name in WORK_FIELDS}
    strategy = fields.pop("strategy", None)
    if strategy is not None:
        return [*_of_strategy(strategy, grid, fields)]
    fitting = [name for name in STRATEGIES if fields.keys() <= ACCEPTED[name]]
    if not fitting:
        raise ValueError(f"no strategy takes all of {', '.join(sorted(fields))}")
    found: list[WideWork] = []
    errors: list[ValueError] = []
    for name in fitting:
        try:
            found += _of_strategy(name, grid, fields)
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _of_strategy(
    strategy: Strategy, grid: TileGrid, fields: Mapping[str, Any]
) -> Iterator[WideWork]:
    if strategy not in GENERATORS:
        raise ValueError(f"strategy={strategy!r} is not one of {STRATEGIES}")
    for field in sorted(fields.keys() - ACCEPTED[strategy]):
        raise ValueError(f"{strategy} does not take {field}={fields[field]!r}")
    if fields.get("simdgroups_n", 1) < 1:
        raise ValueError(f"simdgroups_n={fields['simdgroups_n']} must be at least 1")
    yield from GENERATORS[strategy](grid, **fields, forced=True)


def can_meet(work: Work, overrides: PlanOverrides) -> bool:
    """Returns whether work is compatible with the reduction in the overrides.

    If a strategy is given too, the plan itself reports a mismatch.
    """
    filtered = "reduction" in overrides and "strategy" not in overrides
    return not filtered or work.is_split == (overrides["reduction"] != "none")


def nothing_fits(overrides: PlanOverrides) -> ValueError:
    """Returns the error to raise if no candidate has the given reduction."""
    return ValueError(
        f"reduction={overrides.get('reduction')!r} fits none of the plans that are "
        f"worth comparing; name a strategy too, such as 'split_k'"
    )
