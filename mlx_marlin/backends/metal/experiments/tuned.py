"""The plans of `gemm_staged` that a tuner compares."""

from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.choice import best
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.explicit import STAGED, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

EXPERIMENT_CUTOFF = 1.25
"""The tuner tries plans up to this many times the chosen plan's predicted time."""


def experiments(problem: Problem, device: Device) -> list[Plan]:
    """Returns plans of `gemm_staged` for a tuner, as `Backend.experiments`."""
    chosen = best(problem, device)
    whole = problem.invariant or problem.epilogue.gated
    if chosen.simdgroups_m == 1 or whole or problem.batch > 1:
        return []
    limit = EXPERIMENT_CUTOFF * cost.predict(chosen, device).seconds
    plans: list[Plan] = []
    for buffers, loaders in STAGED:
        overrides = PlanOverrides(
            kernel="gemm_staged", buffers=buffers, loaders=loaders
        )
        staged = best(problem, device, overrides)
        if cost.predict(staged, device).seconds <= limit:
            plans.append(staged)
    return plans
