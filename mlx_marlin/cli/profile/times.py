"""The times of what is profiled: measured, predicted or assumed."""

import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

import metal_emulator
from mlx_marlin import guard, progress
from mlx_marlin.backends import launcher, planner, registry, selection, tuned_results
from mlx_marlin.cli.profile.subjects import Subject
from mlx_marlin.measure import clocks, operands, tuner
from mlx_marlin.measure.profiling.profile import Origin, Profile, of_plan, of_stock
from mlx_marlin.measure.profiling.traffic import Counts
from mlx_marlin.measure.tuner import Arm
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

Item = TypeVar("Item")

MOST_COUNTED = 2**30
"""Most multiplications of a product that the emulator counts: some seconds."""


def on_gpu() -> bool:
    """Returns whether products can be measured on this machine."""
    missing = selection.missing()
    if missing is not None:
        raise ValueError(f"{missing}: nothing can be measured")
    backend = selection.backend()
    return backend in selection.ON_GPU and not tuned_results.stands_for_another(backend)


def assumed(
    subjects: Sequence[Subject], device: PlanningDevice, seconds: float
) -> list[Profile]:
    """Returns profiles with a given time; that of stock MLX is predicted."""
    return [
        _predicted(subject, device)
        if subject.plan is None
        else of_plan(subject.plan, device, seconds, "assumed")
        for subject in subjects
    ]


def predicted(
    subjects: Sequence[Subject], device: PlanningDevice, with_counts: bool
) -> list[Profile]:
    """Returns profiles with times of the cost model.

    `with_counts`: whether the emulator counts too, which takes seconds for a product.
    """
    shown = _with_progress(subjects) if with_counts else subjects
    return [_predicted(subject, device, with_counts) for subject in shown]


def why_not_measured(subject: Subject) -> str | None:
    """Returns why something cannot be measured, or None if it can."""
    try:
        operands.check(subject.problem)
    except ValueError as error:
        return str(error)
    return None if subject.plan is None else guard.why_not(subject.plan)


def measured(subjects: Sequence[Subject], device: PlanningDevice) -> list[Profile]:
    """Returns profiles with times measured on this machine.

    Whatever computes the same product is measured in turns.
    """
    arms: dict[Problem, list[Arm]] = {}
    for subject in subjects:
        arms.setdefault(subject.problem, []).append(subject.plan)
    clock = clocks.clock_of(device)
    profiles = []
    for problem in _with_progress([*arms]):
        inputs = operands.operands(problem, clock.weights(problem))
        products = {arm: tuner.product_of_arm(arm, problem) for arm in arms[problem]}
        spreads = clock.measure(products, inputs)
        profiles += [
            _profile(arm, problem, device, spreads[arm].median, "measured")
            for arm in arms[problem]
        ]
    return profiles


def _with_progress(items: Sequence[Item]) -> Iterable[Item]:
    """Returns items that are profiled one by one; several show a progress bar."""
    return progress.shown(items, "profile", "product") if len(items) > 1 else items


def _profile(
    arm: Arm, problem: Problem, device: PlanningDevice, seconds: float, origin: Origin
) -> Profile:
    if arm is None:
        return of_stock(problem, device, seconds, origin)
    return of_plan(arm, device, seconds, origin)


def _predicted(
    subject: Subject, device: PlanningDevice, with_counts: bool = False
) -> Profile:
    if subject.plan is None:
        stock = registry.of_device(device).predict_stock(subject.problem, device)
        assert stock is not None  # else it is not among the subjects
        return of_stock(subject.problem, device, stock.seconds, "predicted")
    seconds = planner.predict(subject.plan, device).seconds
    counts = _counts(subject.plan) if with_counts else None
    return of_plan(subject.plan, device, seconds, "predicted", counts)


def _counts(plan: Plan) -> Counts | None:
    """Returns what the emulator counts; None if it cannot run the plan in short time.

    MLX makes the weights, which has no groups of other sizes than its own.
    """
    problem = plan.problem
    runs = selection.backend() == "emulator"
    runs = runs and selection.of_plan(plan) is selection.active()
    makes = problem.group_size in problem.format.group_sizes
    if not (runs and makes and problem.flops // 2 <= MOST_COUNTED):
        return None
    inputs = operands.operands(problem, 1)
    with warnings.catch_warnings():
        # Where tiles are split, another kernel completes the output.
        warnings.simplefilter("ignore", metal_emulator.EmulatorWarning)
        launches = metal_emulator.trace(
            launcher.product(plan), inputs.x, *inputs.weights[0]
        )
    memories = [
        memory
        for counters in launches
        for memory in counters.memories()
        if memory.space == "device"
    ]
    return Counts(
        launches=len(launches),
        read_bytes=sum(m.read_bytes - m.repeated_read_bytes for m in memories),
        written_bytes=sum(m.written_bytes - m.repeated_written_bytes for m in memories),
        matrix_products=sum(counters.count("matrix") for counters in launches),
        barriers=sum(counters.count("barrier") for counters in launches),
    )
