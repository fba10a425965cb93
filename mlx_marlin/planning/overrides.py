"""Fields of a plan that a caller fixes."""

from typing import TypedDict

from mlx_marlin.planning.work import Partition, Strategy, Work
from mlx_marlin.planning.work.tiles import Kernel, Reduction


class PlanOverrides(TypedDict, total=False):
    """Fields of a plan that are not to be chosen; the rest follows from them."""

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
    """Returns whether a work's splits, if it has any, can meet as wished."""
    wished = "reduction" in overrides and "strategy" not in overrides
    return not wished or work.is_split == (overrides["reduction"] != "none")


def nothing_fits(overrides: PlanOverrides) -> ValueError:
    """Returns the error where no candidate has the wished reduction."""
    return ValueError(
        f"reduction={overrides.get('reduction')!r} fits none of the plans that are "
        f"worth comparing; name a strategy too, such as 'split_k'"
    )
