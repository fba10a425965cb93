"""What to profile: products, and what computes them."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mlx_marlin.backends import planner, registry, selection, tuned_results
from mlx_marlin.cli import arguments, models
from mlx_marlin.measure.profiling.document import Skipped
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A product and what computes it: a plan, or None for stock MLX."""

    problem: Problem
    plan: Plan | None


WhyNot = Callable[[Subject], str | None]


def default_set() -> str:
    """Returns the default set of products as text."""
    shapes = ", ".join(f"{n}x{k}" for n, k in SHAPES)
    return f"weights of {shapes}, with {arguments.listed(ROWS)} rows"


def find(
    args: argparse.Namespace, device: PlanningDevice, why_not: WhyNot | None
) -> tuple[list[Subject], list[Skipped]]:
    """Returns what the arguments ask for, and what cannot be profiled.

    `why_not`: returns why something cannot be measured on this machine, or None; None
    if nothing is measured.
    """
    found: list[Subject] = []
    skipped: list[Skipped] = []
    for problem, kernel in _wanted(args, device):
        try:
            found.append(_subject(problem, kernel, device, why_not))
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
    problem: Problem, kernel: str, device: PlanningDevice, why_not: WhyNot | None
) -> Subject:
    """Returns what computes a product."""
    is_measured = why_not is not None
    if kernel == STOCK:
        subject = _of_stock(problem, device, is_measured)
    else:
        plan = _plan(problem, device, kernel, is_measured)
        subject = Subject(problem=problem, plan=plan)
    reason = why_not(subject) if why_not else None
    if reason is not None:
        raise ValueError(reason)
    return subject


def _plan(
    problem: Problem, device: PlanningDevice, kernel: str, is_measured: bool
) -> Plan:
    """Returns the plan of a kernel, or of the fastest one.

    That is a tuned plan if there is one for this machine.
    """
    reason = registry.of_device(device).unsupported(problem, device)
    if reason is not None:
        raise ValueError(reason)
    if kernel != FASTEST:
        overrides = PlanOverrides()
        overrides["kernel"] = kernel
        return planner.make(problem, device=device, **overrides)
    tuned = None
    if is_measured:
        tuned = tuned_results.find(problem, device, selection.backend())
    plan = None if tuned is None else tuned.plan
    return plan if isinstance(plan, Plan) else planner.choose(problem, device)


def _of_stock(problem: Problem, device: PlanningDevice, is_measured: bool) -> Subject:
    """Returns stock MLX's product."""
    native = in_stock_mlx(problem)
    if native is None:
        raise ValueError(f"stock MLX has no groups of {problem.group_size}")
    has_model = registry.of_device(device).predict_stock(native, device) is not None
    if not (is_measured or has_model):
        raise ValueError(f"there is no model of stock MLX on {device.name}")
    return Subject(problem=native, plan=None)
