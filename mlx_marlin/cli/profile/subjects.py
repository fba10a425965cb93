"""What to profile: products, and the kernels that compute them."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mlx_marlin.backends import planner, registry, selection, tuned_results
from mlx_marlin.cli import models
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.profiling.document import Skipped
from mlx_marlin.weights.formats import LAYOUTS, MODE_DEFAULTS, format_of

ROWS = (1, 8, 32, 512)
"""Rows of the default set and of models."""
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""n and k of the default set: products of a Llama of the 8B shape."""
SINGLE = re.compile(r"(\d+),(\d+),(\d+)")
SINGLE_MODE, SINGLE_GROUP = "symmetric", 128
"""Default format of --single-config, as in Marlin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A product and what computes it: a plan, or None for stock MLX."""

    problem: Problem
    plan: Plan | None

    @property
    def kernel(self) -> str:
        """Name of the kernel, or "stock"."""
        return "stock" if self.plan is None else self.plan.kernel


def default_set_as_text() -> str:
    """Returns the default set of products as text."""
    shapes = ", ".join(f"{n}x{k}" for n, k in SHAPES)
    return f"weights of {shapes}, with {models.listed(ROWS)} rows"


def find(
    args: argparse.Namespace, device: PlanningDevice, is_measured: bool
) -> tuple[list[Subject], list[Skipped]]:
    """Returns what the arguments ask for, and what cannot be profiled.

    Args:
        args: The arguments of the command.
        device: The device to plan for.
        is_measured: Whether times are measured, here and now.

    Raises:
        ValueError: If the arguments are wrong, or nothing can be profiled.
    """
    found: list[Subject] = []
    skipped: list[Skipped] = []
    for problem in _problems(args, device):
        for kernel in _kernels(args, device):
            try:
                plan = _plan(problem, device, kernel, is_measured)
                found.append(Subject(problem=problem, plan=plan))
            except ValueError as error:
                name = kernel or "any kernel"
                skipped.append(Skipped(problem=problem, kernel=name, reason=str(error)))
        if args.compare:
            _add_stock(problem, device, is_measured, found, skipped)
    if not found:
        raise ValueError("\n".join(row.reason for row in skipped))
    return found, skipped


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
    sizes = SINGLE.fullmatch(args.single_config)
    if sizes is None:
        raise ValueError(
            f"--single-config {args.single_config!r}, expected M,N,K such as "
            f"1,4096,4096"
        )
    m, n, k = map(int, sizes.groups())
    mode, group_size = args.mode or SINGLE_MODE, args.group_size
    if group_size is None and (mode == "affine" or mode not in MODE_DEFAULTS):
        group_size = SINGLE_GROUP
    return _problem((m, n, k), args, device, mode, group_size)


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
    for option in ("mode", "bits", "group_size"):
        if (value := getattr(args, option)) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is not for a model: "
                f"{args.model!r} has its own"
            )
    return models.problems(args.model, ROWS, args.layout)


def _kernels(args: argparse.Namespace, device: PlanningDevice) -> Iterable[str | None]:
    """Returns the kernels to profile; None is the fastest one."""
    if args.all_kernels:
        return registry.of_device(device).kernels
    return [args.kernel]


def _plan(
    problem: Problem, device: PlanningDevice, kernel: str | None, is_measured: bool
) -> Plan:
    """Returns the plan of a kernel, or the fastest one; a tuned plan if there is one.

    Raises:
        ValueError: If the kernel cannot compute the product.
    """
    reason = registry.of_device(device).unsupported(problem, device)
    if reason is not None:
        raise ValueError(reason)
    if kernel is None and is_measured:
        tuned = tuned_results.find(problem, device, selection.backend())
        return planner.make(problem, device=device) if tuned is None else tuned.plan
    overrides = PlanOverrides()
    if kernel is not None:
        overrides["kernel"] = kernel
    return planner.make(problem, device=device, **overrides)


def _add_stock(
    problem: Problem,
    device: PlanningDevice,
    is_measured: bool,
    found: list[Subject],
    skipped: list[Skipped],
) -> None:
    """Adds stock MLX, or why it cannot be profiled."""
    native = _native(problem)
    has_model = registry.of_device(device).predict_stock(problem, device) is not None
    reason = None
    if native is None:
        reason = f"stock MLX has no groups of {problem.group_size} in this format"
    elif not is_measured and not has_model:
        reason = f"there is no model of stock MLX on {device.name}"
    if native is None or reason is not None:
        skipped.append(Skipped(problem=problem, kernel="stock", reason=reason or ""))
        return
    subject = Subject(problem=native, plan=None)
    if subject not in found:
        found.append(subject)


def _native(problem: Problem) -> Problem | None:
    """Returns a problem as stock MLX has it, or None if it has no such groups.

    Integers without biases are compared with affine ones of as many bits.
    """
    mode = problem.mode if problem.mode in MODE_DEFAULTS else "affine"
    if problem.group_size not in format_of(mode, problem.bits).group_sizes:
        return None
    return replace(problem, mode=mode, layout="mlx")
