"""Chooses a plan: candidates, what each should cost, the cheapest one.

Pure Python and pure functions of (problem, device): no clock, no MLX, no NumPy.
"""

from functools import lru_cache
from math import inf
from typing import Unpack

from mlx_marlin.backends.cuda import search
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.experts import choose_cuda_gather
from mlx_marlin.backends.devices import Target, current, named
from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.candidates import Wishes, candidates
from mlx_marlin.backends.metal.cost import Prediction, least_seconds
from mlx_marlin.backends.metal.dense import dense_if_faster
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.backends.metal.experts import choose_gather, gather_reason
from mlx_marlin.backends.metal.limits import OF_CUDA
from mlx_marlin.backends.metal.stock.handover import (
    handover,
    margin_over_stock,
    stock_seconds,
)
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.planning.choice import Candidate, Choice
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.work import STRATEGIES, Work

__all__ = [
    "Candidate",
    "Choice",
    "Prediction",
    "Wishes",
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

MODEL_ERROR = 0.06
"""How far the cost model is from published times; a split must gain more than this."""

STAGED = ((1, 0), (2, 0), (3, 0), (2, 1))
"""(buffers, loaders) of `gemm_staged` that are worth a try."""
HOPELESS = 1.25
"""How many times the chosen plan's predicted time is too long for a try."""


@lru_cache(maxsize=4096)
def choose(problem: Problem, device: Target) -> Plan:
    """Returns the plan with the least predicted time; cached.

    Args:
        problem: The product to compute.
        device: The chip to plan for, such as `device.current()`.
    """
    return make(problem, device=device)


@lru_cache(maxsize=4096)
def choose_dense(problem: Problem, device: Target) -> DensePlan | None:
    """Returns the plain product of decoded weights if that should be fastest; cached.

    Of a native weight by the same margin by which a call leaves stock MLX.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
    if isinstance(device, CudaDevice):
        return search.dense(problem)
    others = predict(choose(problem, device), device).seconds
    if problem.layout == "mlx":
        margin = margin_over_stock(problem, device)
        others = min(others, stock_seconds(problem, device)) / margin
    return dense_if_faster(problem, device, others)


@lru_cache(maxsize=4096)
def stock_reason(problem: Problem, device: Target) -> str | None:
    """Says why stock MLX should serve a product for speed; None if ours should.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
    if isinstance(device, CudaDevice):
        return search.handover(problem, device)
    return handover(problem, device, predict(choose(problem, device), device))


def predict(plan: Plan, device: Target) -> Prediction:
    """Returns what the model says about a plan on a device."""
    if isinstance(device, CudaDevice):
        return search.predict(plan, device)
    return cost.predict(plan, device)


def make(
    problem: Problem, *, device: Target = DEFAULT, **wishes: Unpack[Wishes]
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
    if isinstance(device, CudaDevice):
        return search.make(problem, device, wishes)
    _refuse_cuda(wishes)
    best: Plan | None = None
    least: tuple[float, ...] = (inf,)

    def can_win(body: Plan, work: Work) -> bool:
        if wishes:
            return True  # or it would depend on times which wishes are refused
        seconds = least_seconds(body, device, work.is_split)
        return seconds * _doubt(work.is_split) <= least[0]

    for plan in candidates(problem, device, wishes, can_win):
        rank = _rank(plan, cost.predict(plan, device))
        if rank < least:
            best, least = plan, rank
    assert best is not None, "there is at least one candidate"
    return best


def compare(
    problem: Problem, *, device: Target = DEFAULT, **wishes: Unpack[Wishes]
) -> Choice:
    """Returns what `make` would, with all that it was compared to.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
        **wishes: As for `make`.

    Raises:
        ValueError: If no plan has these fields.
    """
    if isinstance(device, CudaDevice):
        return search.compare(problem, device, wishes)
    _refuse_cuda(wishes)
    compared = [
        Candidate(plan=plan, prediction=cost.predict(plan, device))
        for plan in candidates(problem, device, wishes)
    ]
    compared.sort(key=lambda each: _rank(each.plan, each.prediction))
    best = compared[0]
    return Choice(
        plan=best.plan,
        device=device,
        prediction=best.prediction,
        stock=stock_prediction(problem, device),
        reason=handover(problem, device, best.prediction),
        candidates=tuple(compared),
    )


def experiments(problem: Problem, device: Target) -> list[Plan]:
    """Returns plans of `gemm_staged` for a tuner to try: nothing else asks for them.

    Where several simdgroups of the chosen plan decode the same weights, and the model
    does not expect much less of them.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
    """
    best = choose(problem, device)
    if best.simdgroups_m == 1 or problem.invariant:  # nor any of CUDA's
        return []
    most = HOPELESS * predict(best, device).seconds
    plans = []
    for buffers, loaders in STAGED:
        wishes = Wishes(kernel="gemm_staged", buffers=buffers, loaders=loaders)
        staged = make(problem, device=device, **wishes)
        if predict(staged, device).seconds <= most:
            plans.append(staged)
    return plans


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


def _refuse_cuda(wishes: Wishes) -> None:
    if wishes.get("kernel") in OF_CUDA:
        raise ValueError(
            f"kernel={wishes['kernel']!r} needs a CUDA device, such as 'NVIDIA H200'"
        )


def _rank(plan: Plan, prediction: Prediction) -> tuple[float, int, int, int, int]:
    """Returns what plans are compared by: time first, then the simpler one."""
    return (
        prediction.seconds * _doubt(plan.is_split),
        plan.dispatches,
        STRATEGIES.index(plan.work.strategy),
        plan.simdgroups_k,
        plan.num_threadgroups,
    )


def _doubt(is_split: bool) -> float:
    """Returns the factor on a time that a split has to make good."""
    return 1 + MODEL_ERROR * is_split
