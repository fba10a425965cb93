"""What `mlx-marlin profile` compares: products, what computes them, and its time."""

import argparse
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import metal_emulator
from mlx_marlin import guard, progress
from mlx_marlin.backends import graph, measured_results, planner, registry, selection
from mlx_marlin.cli import arguments, models
from mlx_marlin.measure import clocks, operands, tuner
from mlx_marlin.measure.profiling import Profile, Skipped
from mlx_marlin.measure.tuner import Arm
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, in_stock_mlx, problem_of
from mlx_marlin.weights.formats import LAYOUTS, MODE_DEFAULTS

ROWS = (1, 8, 32, 512)
"""Rows of the default set and of models."""
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""n and k of the default set: products of a Llama of the 8B shape."""
SINGLE_MODE, SINGLE_GROUP = "symmetric", 128
"""Default format of --single-config, as in Marlin."""
FASTEST, STOCK = "the fastest kernel", "stock MLX"
"""What computes a product, besides the names of kernels."""


class Subject(NamedTuple):
    """A product and what computes it: a plan, or None for stock MLX."""

    problem: Problem
    plan: Plan | None


def default_set() -> str:
    """Returns the default set of products as text."""
    shapes = ", ".join(f"{n}x{k}" for n, k in SHAPES)
    return f"weights of {shapes}, with {arguments.listed(ROWS)} rows"


def find(
    args: argparse.Namespace, device: PlanningDevice, is_measured: bool
) -> tuple[list[Subject], list[Skipped]]:
    """Returns what the arguments ask for, and what cannot be profiled."""
    found: list[Subject] = []
    skipped: list[Skipped] = []
    for problem, kernel in _wanted(args, device):
        try:
            found.append(_subject(problem, kernel, device, is_measured))
        except ValueError as error:
            reason = str(error)
            skipped.append(Skipped(problem=problem, kernel=kernel, reason=reason))
    if not found:
        reasons = dict.fromkeys(row.reason for row in skipped)
        raise ValueError(f"nothing can be profiled: {'; '.join(reasons)}")
    return found, skipped


def _wanted(
    args: argparse.Namespace, device: PlanningDevice
) -> Iterator[tuple[Problem, str]]:
    """Yields products, each with the name of what is to compute it."""
    kernels: Iterable[str] = [args.kernel or FASTEST]
    if args.all_kernels:
        kernels = registry.of_device(device).traits.kernels
    for problem in _problems(args, device):
        yield from ((problem, kernel) for kernel in kernels)
        if args.compare:
            yield problem, STOCK


def _problems(args: argparse.Namespace, device: PlanningDevice) -> list[Problem]:
    if args.model:
        return _model_problems(args)
    if args.single_config:
        return [_single_problem(args, device)]
    return [
        _problem((m, n, k), args, device, args.mode or "affine", args.group_size)
        for n, k in SHAPES
        for m in ROWS
    ]


def _single_problem(args: argparse.Namespace, device: PlanningDevice) -> Problem:
    sizes = arguments.product(args.single_config, "--single-config")
    mode, group_size = args.mode or SINGLE_MODE, args.group_size
    if group_size is None and (mode == "affine" or mode not in MODE_DEFAULTS):
        group_size = SINGLE_GROUP
    return _problem(sizes, args, device, mode, group_size)


def _problem(
    sizes: tuple[int, int, int],
    args: argparse.Namespace,
    device: PlanningDevice,
    mode: str,
    group_size: int | None,
) -> Problem:
    """Returns a problem in the layout that the arguments or its format choose."""

    def in_layout(layout: str) -> Problem:
        return problem_of(
            *sizes, mode=mode, bits=args.bits, group_size=group_size, layout=layout
        )

    if args.layout:
        return in_layout(args.layout)
    usual: str = registry.of_device(device).traits.default_layout
    try:
        return in_layout(usual)
    except ValueError:
        (other,) = {*LAYOUTS} - {usual}
        return in_layout(other)


def _model_problems(args: argparse.Namespace) -> list[Problem]:
    arguments.refuse_format_of_model(args, args.model)
    models.check(args.model)
    return models.problems(args.model, ROWS, args.layout)


def _subject(
    problem: Problem, kernel: str, device: PlanningDevice, is_measured: bool
) -> Subject:
    """Returns what computes a product."""
    if kernel == STOCK:
        subject = _of_stock(problem, is_measured)
    else:
        subject = Subject(problem, _plan(problem, device, kernel, is_measured))
    if is_measured:
        operands.check(subject.problem)
        if subject.plan is not None and (reason := guard.why_not(subject.plan)):
            raise ValueError(reason)
    return subject


def _plan(
    problem: Problem, device: PlanningDevice, kernel: str, is_measured: bool
) -> Plan:
    """Returns the plan of a kernel, or of the fastest one.

    That is a measured plan if there is one for this machine.
    """
    reason = registry.of_device(device).unsupported(problem, device)
    if reason is not None:
        raise ValueError(reason)
    if kernel != FASTEST:
        overrides = PlanOverrides()
        overrides["kernel"] = kernel
        return planner.make(problem, device=device, **overrides)
    found = None
    if is_measured:
        found = measured_results.find(problem, device, selection.backend())
    plan = None if found is None else found.plan
    return plan if isinstance(plan, Plan) else planner.choose(problem, device)


def _of_stock(problem: Problem, is_measured: bool) -> Subject:
    """Returns stock MLX's product."""
    native = in_stock_mlx(problem)
    if native is None:
        raise ValueError(f"stock MLX has no groups of {problem.group_size}")
    if not is_measured:
        raise ValueError("the time of stock MLX is measured, not predicted")
    return Subject(native, None)


Item = TypeVar("Item")

MOST_COUNTED = 2**30
"""Most multiplications of a product that the emulator counts: some seconds."""


def on_gpu() -> bool:
    """Returns whether products can be measured on this machine."""
    missing = selection.missing()
    if missing is not None:
        raise ValueError(f"{missing}: nothing can be measured")
    is_other = measured_results.stands_for_another(selection.backend())
    return selection.backend() in selection.ON_GPU and not is_other


def timed(
    args: argparse.Namespace,
    subjects: Sequence[Subject],
    device: PlanningDevice,
    is_measured: bool,
) -> list[Profile]:
    """Returns profiles with measured, assumed or predicted times."""
    if is_measured:
        return _measured(subjects, device)
    # The table has no counts; a document and the details of a product have.
    counts = args.single_config is not None or args.json is not None
    return [
        Profile(
            problem=problem,
            plan=plan,
            device=device,
            seconds=args.assume_ms / 1e3
            if args.assume_ms is not None
            else planner.predict(plan, device).seconds,
            origin="predicted" if args.assume_ms is None else "assumed",
            counts=_counts(plan) if counts and args.assume_ms is None else None,
        )
        for problem, plan in (_with_progress(subjects) if counts else subjects)
        if plan is not None  # stock MLX is not among them
    ]


def _measured(subjects: Sequence[Subject], device: PlanningDevice) -> list[Profile]:
    """Measures whatever computes the same product in turns."""
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
            Profile(
                problem=problem,
                plan=arm,
                device=device,
                seconds=spreads[arm].median,
                origin="measured",
            )
            for arm in arms[problem]
        ]
    return profiles


def _with_progress(items: Sequence[Item]) -> Iterable[Item]:
    """Returns items that are profiled one by one; several show a progress bar."""
    return progress.shown(items, "profile", "product") if len(items) > 1 else items


def _counts(plan: Plan) -> dict[str, int] | None:
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
            graph.product(plan), inputs.x, *inputs.weights[0]
        )
    memories = [
        memory
        for counters in launches
        for memory in counters.memories()
        if memory.space == "device"
    ]
    return {
        "launches": len(launches),
        # Without those that a compiler would keep in registers
        "read_bytes": sum(m.read_bytes - m.repeated_read_bytes for m in memories),
        "written_bytes": sum(
            m.written_bytes - m.repeated_written_bytes for m in memories
        ),
        # Of 8x8 fragments
        "matrix_products": sum(counters.count("matrix") for counters in launches),
        "barriers": sum(counters.count("barrier") for counters in launches),
    }
