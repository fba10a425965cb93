"""Chooses plans: asks the back end of a device for candidates and takes the cheapest.

Pure functions of (problem, device): no clock, no MLX, no NumPy.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Unpack

from mlx_marlin.backends import registry
from mlx_marlin.backends.cuda.experts.search import choose_cuda_gather
from mlx_marlin.backends.devices import current, named
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.backends.metal.experts.search import choose_gather, gather_reason
from mlx_marlin.planning import search
from mlx_marlin.planning.choice import Choice
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem, problem_of

__all__ = [
    "choose",
    "choose_cuda_gather",
    "choose_dense",
    "choose_gather",
    "compare",
    "experiments",
    "gather_reason",
    "make",
    "plan",
    "predict",
    "stock_reason",
]


@lru_cache(maxsize=4096)
def choose(problem: Problem, device: PlanningDevice) -> Plan:
    """Returns the plan with the least predicted time; cached.

    Args:
        problem: The product to compute.
        device: The chip to plan for, such as `devices.current()`.
    """
    return make(problem, device=device)


@lru_cache(maxsize=4096)
def choose_dense(problem: Problem, device: PlanningDevice) -> DensePlan | None:
    """Returns the plain product of decoded weights if that should be fastest; cached.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
    ours = partial(_of_chosen, problem, device)
    return registry.of_device(device).decode_once(problem, device, ours)


@lru_cache(maxsize=4096)
def stock_reason(problem: Problem, device: PlanningDevice) -> str | None:
    """Returns why stock MLX should serve a product for speed; None if ours should.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
    ours = partial(_of_chosen, problem, device)
    return registry.of_device(device).handover(problem, device, ours)


def predict(plan: Plan, device: PlanningDevice) -> Prediction:
    """Returns what the model says about a plan on a device."""
    return registry.of_device(device).predict(plan, device)


def make(
    problem: Problem,
    *,
    device: PlanningDevice = DEFAULT,
    **overrides: Unpack[PlanOverrides],
) -> Plan:
    """Returns the best plan that has the wished fields.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
        **wishes: Fields of `Plan` and `Work` to keep as given, such as
            `strategy="stream_k"`; the remaining ones are chosen.

    Raises:
        ValueError: If no plan has these fields.
    """
    offer = registry.of_device(device).options
    return search.best(partial(offer, problem, device, overrides))


def compare(
    problem: Problem,
    *,
    device: PlanningDevice = DEFAULT,
    **overrides: Unpack[PlanOverrides],
) -> Choice:
    """Returns what `make` would, with all that it was compared to.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
        **wishes: As for `make`.

    Raises:
        ValueError: If no plan has these fields.
    """
    backend = registry.of_device(device)
    candidates = search.ranked(partial(backend.options, problem, device, overrides))
    ours = candidates[0].prediction
    return Choice(
        plan=candidates[0].plan,
        device=device,
        prediction=ours,
        stock=backend.predict_stock(problem, device),
        reason=backend.handover(problem, device, lambda: ours),
        candidates=candidates,
    )


def experiments(problem: Problem, device: PlanningDevice) -> Sequence[Plan]:
    """Returns plans for a tuner to try beside the candidates.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
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
) -> Choice:
    """Returns how our kernels would compute a product of m rows, k→n, and why so.

    Args:
        m: Rows of the activations.
        n: Features that come out.
        k: Features that go in.
        group_size: Weights along k that share a scale. Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: The scheme, such as "affine", "mxfp4" or "symmetric".
        dtype: Of activations, result and scales that are not bytes: "float16",
            "bfloat16" or "float32".
        layout: "mlx" or "marlin".
        batch: Products of this shape, each with rows and a weight of its own.
        chip: Name such as "Apple M3 Max" or "NVIDIA H200". Default: the chip here, or
            a conservative stand-in where there is none.

    Returns:
        The choice: `explain()` says it in a line, `table()` what it was compared to.

    Raises:
        ValueError: If the product or the chip is not one that we know.
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


def _of_chosen(problem: Problem, device: PlanningDevice) -> Prediction:
    return predict(choose(problem, device), device)
