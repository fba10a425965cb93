"""Plan fields that a caller sets explicitly."""

from typing import TypedDict

from mlx_marlin.planning.work import Partition, Strategy, Work
from mlx_marlin.planning.work.tiles import Kernel, Reduction

STAGED = ((1, 0), (2, 0), (3, 0), (2, 1))
"""(buffers, loaders) of `gemm_staged` that are listed, tuned and compared."""


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
    subtract: bool
    buffers: int
    loaders: int


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
