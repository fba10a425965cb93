"""Proposes plans: asks the back end of a device for candidates and takes the cheapest.

The functions depend on their arguments only: they use no clock, MLX or NumPy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Unpack

from mlx_marlin.backends import registry
from mlx_marlin.backends.devices import current, named
from mlx_marlin.planning import search
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.search import Candidate, Prediction

if TYPE_CHECKING:
    from mlx_marlin.planning.search import Choice


@lru_cache(maxsize=4096)
def propose(problem: Problem, device: PlanningDevice) -> Candidate:
    """Returns the plan with the shortest predicted time, and its times; cached."""
    return search.best(registry.of_device(device).candidates(problem, device, {}))


def choose(problem: Problem, device: PlanningDevice) -> Plan:
    """Returns the plan with the shortest predicted time."""
    return propose(problem, device).plan


def choose_dequantize(
    problem: Problem, device: PlanningDevice
) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if it is faster."""
    return registry.of_device(device).dequantize_first(problem, device)


def choose_gather(gather: GatherProblem, device: PlanningDevice) -> GatherPlan:
    """Returns the plan for experts' products."""
    return registry.of_device(device).choose_gather(gather, device)


def predict(plan: Plan | GatherPlan, device: PlanningDevice) -> Prediction:
    """Returns the time that the cost model predicts for a plan on a device."""
    return registry.of_device(device).predict(plan, device)


def make(
    problem: Problem,
    *,
    device: PlanningDevice | None = None,
    **overrides: Unpack[PlanOverrides],
) -> Plan:
    """Returns the best plan that has the given fields."""
    device = device or registry.default_device()
    backend = registry.of_device(device)
    return search.best(backend.candidates(problem, device, overrides)).plan


def compare(
    problem: Problem,
    *,
    device: PlanningDevice | None = None,
    **overrides: Unpack[PlanOverrides],
) -> "Choice":
    """Returns the plan that `make` returns, and the candidates it was compared to."""
    from mlx_marlin.planning.search import Choice

    device = device or registry.default_device()
    backend = registry.of_device(device)
    candidates = search.ranked(backend.candidates(problem, device, overrides))
    return Choice(
        plan=candidates[0].plan,
        device=device,
        prediction=candidates[0].prediction,
        reason=backend.handover(problem, device, candidates[0].plan),
        candidates=candidates,
    )


def experiments(problem: Problem, device: PlanningDevice) -> Sequence[Plan]:
    """Returns plans for a tuner to try in addition to the candidates."""
    return registry.of_device(device).experiments(problem, device)


def plan(
    m: int,
    n: int,
    k: int,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    dtype: str = "float16",
    layout: str = "mlx",
    batch: int = 1,
    chip: str | None = None,
) -> "Choice":
    """Returns how our kernels would compute a product of m rows, k→n.

    Args:
        m: Rows of the activations.
        n: Output features.
        k: Input features.
        group_size: Weights along k that share a scale. Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: The quantization scheme, such as "affine", "mxfp4" or "symmetric".
        dtype: Of activations, result and scales that are not bytes: "float16",
            "bfloat16" or "float32".
        layout: "mlx" or "marlin".
        batch: Number of products of this shape with different weights.
        chip: Name such as "Apple M3 Max" or "NVIDIA H200". Default: this machine's
            GPU, or a small one if it has none that is supported.

    Returns:
        The choice; `explain()` summarizes it in a line, `table()` lists the candidates.

    Raises:
        ValueError: If the product or the chip is not supported.
    """
    if chip is not None and not isinstance(chip, str):
        raise ValueError(f"chip={chip!r}, expected a name such as 'Apple M3 Max'")
    target = current() if chip is None else named(chip)
    problem = problem_of(
        m,
        n,
        k,
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        layout=layout,
        batch=batch,
    )
    return compare(problem, device=target)
