"""`mlx-marlin tune`: measures plans on this machine and keeps the fastest."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from mlx_marlin import guard, progress, state, tables
from mlx_marlin.backends import (
    measured_results,
    planner,
    result_files,
    selection,
)
from mlx_marlin.cli import arguments, models, output, tune_model
from mlx_marlin.cli.arguments import BOTH
from mlx_marlin.cli.cache import check_writable
from mlx_marlin.lm import measured_models
from mlx_marlin.measure import clocks, machine, result_file, tuner
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.tuner import Arm, Outcome
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import this_machine
from mlx_marlin.tables import Table, Value

ROWS = (1, 2, 4, 8, 16, 32)
"""Default rows (M) of models and of shapes without M."""
LEAST_SECONDS, MAX_SECONDS = 1e-9, 86400.0
"""Limits of --seconds; the upper one is a day."""

DESCRIPTION = """
Measure the plans of this package and stock MLX on this machine, and keep the fastest.
Later products of the same shapes use it. For a model, also compare the settings of
`optimize` with stock MLX by forward passes; `optimize(model)` then uses the fastest.
"""
EPILOG = """
examples:
  mlx-marlin tune 8x4096x11008
  mlx-marlin tune 4096x4096 4096x11008 --rows 1,4,8 --dtype bfloat16
  mlx-marlin tune 8x4096x11008 --mode mxfp4 --layout both
  mlx-marlin tune mlx-community/Qwen3-4B-4bit --layout marlin
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL_OR_SHAPE",
        help="MxNxK or M,N,K; NxK for several M; or the name or folder of an mlx-lm "
        "model",
    )
    _add_options(parser)
    tune_model.add_options(parser)
    shapes = parser.add_argument_group("format of shapes (a model has its own)")
    arguments.add_format(shapes)


def _add_options(parser: argparse.ArgumentParser) -> None:
    arguments.add_rows(parser, ROWS)
    arguments.add_layout(
        parser, BOTH, default="that of `optimize`, or the only one of the format"
    )
    arguments.add_dtype(parser, "the model's, or float16")
    parser.add_argument(
        "--seconds",
        type=float,
        default=clocks.SECONDS,
        help=f"time limit for each problem; default: {clocks.SECONDS:g}",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only list the plans to measure"
    )
    parser.add_argument(
        "--clear", action="store_true", help="remove all stored results first"
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Tunes products, then models; returns 1 if the result of a plan was wrong."""
    streams = tune_model.streams(args)
    _check_arguments(args)
    names = [] if args.no_model else _model_names(args)
    found = _tunable(problems(args))
    if args.json is not None and (args.dry_run or not found):
        raise ValueError("--json writes times of products, and none is measured")
    if args.dry_run:
        plans = (listing(problem, this_machine.device()) for problem in found)
        texts = [*map(tables.printed, plans)]
        texts += [tune_model.dry_run(name, streams) for name in names]
        print("\n\n".join(texts))
        return 0
    folder = result_files.folder()
    clock = models.clock(args.seconds) if found else None
    if found or (names and measured_models.why_not_measured() is None):
        check_writable(folder, result_files.locked)
    if args.clear:
        print(f"files removed from {folder}: {result_files.clear(folder)}")
    status = _tune(found, clock, args) if clock else 0
    for name in names:
        tune_model.tune(name, streams, args.max_minutes)
    return status


def _model_names(args: argparse.Namespace) -> list[str]:
    names = (each for each in args.targets if arguments.shape(each) is None)
    return [*dict.fromkeys(names)]


def _check_arguments(args: argparse.Namespace) -> None:
    if not args.targets and not args.clear:
        raise ValueError(
            "expected a shape such as 8x4096x11008, a model, or the option --clear"
        )
    arguments.check_range("--seconds", args.seconds, LEAST_SECONDS, MAX_SECONDS)
    if args.clear and args.dry_run:
        raise ValueError("--clear and --dry-run exclude each other: use one of them")
    if args.rows:
        arguments.numbers(args.rows)
    for name in _model_names(args):
        arguments.refuse_format_of_model(args, name)
        try:
            models.check(name)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{name!r} is neither a shape such as 8x4096x11008 nor a model: {error}"
            ) from error


def problems(args: argparse.Namespace) -> list[Problem]:
    """Returns the problems that the arguments specify, without duplicates."""
    rows = arguments.numbers(args.rows) if args.rows else None
    found: list[Problem] = []
    usual: Sequence[int]
    for target in args.targets:
        shape = arguments.shape(target)
        if shape is None:
            of_one_row, usual = _model_problems(target, args), ROWS
        else:
            m, n, k = shape
            of_one_row = _shape_problems(n, k, args)
            usual = ROWS if m is None else (m,)
        found += [replace(each, m=m) for each in of_one_row for m in rows or usual]
    return [*dict.fromkeys(found)]


def listing(problem: Problem, target: PlanningDevice) -> Table:
    """Returns the plans to measure for a problem, with predicted times."""
    times_stock = selection.backend() in selection.ON_GPU
    arms = tuner.arms(problem, target, times_stock=times_stock)
    unit = "us by the model, not measured"
    rows = [{"plan": tuner.name(arm), unit: _predicted(arm, target)} for arm in arms]
    return Table(title=problem.explain(), rows=rows)


def _predicted(arm: Arm, target: PlanningDevice) -> float | None:
    """Returns the predicted microseconds; None for stock MLX, which has no model."""
    return None if arm is None else planner.predict(arm, target).seconds * 1e6


def _tunable(found: list[Problem]) -> list[Problem]:
    """Returns the problems that can be tuned, and prints why the others cannot."""
    reasons = {each: tuner.why_not(each, this_machine.device()) for each in found}
    messages = [
        f"{problem.explain()}: not measured, {reason}"
        for problem, reason in reasons.items()
        if reason is not None
    ]
    if messages and len(messages) == len(found):
        raise ValueError("\n".join(messages))
    for message in messages:
        print(message)
    return [problem for problem in found if reasons[problem] is None]


def _tune(found: list[Problem], clock: Clock, args: argparse.Namespace) -> int:
    """Measures the problems, and stores every result immediately."""
    target, folder = this_machine.device(), result_files.folder()
    here = measured_results.machine(target, selection.backend())
    written = ResultFile(machine=machine.facts(target), date=date.today().isoformat())
    outcomes: list[Outcome] = []
    total = sum(tuner.steps(problem, target, clock) for problem in found)
    with progress.bar("tune", "step", total) as steps:
        for problem in found:
            outcome = tuner.tune(problem, target, clock, steps.update)
            progress.print_above(measurements(problem, outcome, clock))
            if outcome.result:
                result_files.write(folder, here, [outcome.result])
            outcomes.append(outcome)
            written.products.extend(outcome.rows(problem, clock))
            written.notes.extend(notes(problem, outcome))
            output.write_text(args, result_file.text(written))
    state.reset()
    print(conclusion(outcomes, folder / here.file_name))
    return 1 if any(each.wrong or each.failed for each in outcomes) else 0


def _shape_problems(n: int, k: int, args: argparse.Namespace) -> list[Problem]:
    """Returns the problem of one row of a shape, in every layout to measure."""
    problem = partial(arguments.problem, args, 1, n, k)
    packed = problem("marlin")
    return [problem(layout) for layout in _layouts(args, packed)]


def _layouts(args: argparse.Namespace, problem: Problem) -> tuple[str, ...]:
    """Returns the layouts in which to measure a problem."""
    wanted, supported = models.layouts(args.layout), problem.format.layouts
    if args.layout not in (None, BOTH):
        return wanted
    return tuple(each for each in wanted if each in supported) or supported[:1]


def _model_problems(name: str, args: argparse.Namespace) -> list[Problem]:
    """Returns the problem of one row of every layer of a model.

    The weights are not read.
    """
    found, others = models.products(name, models.layouts(args.layout))
    if others:
        print(
            f"{name}: {others} quantized layers are in formats that our kernels "
            f"do not read"
        )
    return [_with_dtype(problem, args.dtype) for problem in found]


def _with_dtype(problem: Problem, dtype: str | None) -> Problem:
    """Returns a problem with another dtype of activations, if it is given.

    Scales have the dtype of the activations, except those that are integers.
    """
    if dtype is None:
        return problem
    scales = problem.format.scale_dtype(dtype)
    return replace(problem, dtype=dtype, scale_dtype=scales)


WRONG = "WRONG product, never used"
FAILED = "a kernel failed its check, never used"
NOISY = "too noisy: nothing was kept, measure again"


def measurements(problem: Problem, outcome: Outcome, clock: Clock) -> str:
    """Returns the table of measured times of a problem and the plan that is kept."""
    samples = max((spread.samples for spread in outcome.arms.values()), default=1)
    how = f": medians of {samples}, +- half the interquartile range"
    title = f"{problem.explain()}{how if samples > 1 else ''}"
    names = ("plan", f"us ({clock.name})", "+-", "verdict")
    cells: list[tuple[Value, ...]] = [
        (
            *(tuner.name(arm), spread.median * 1e6, spread.range / 2 * 1e6),
            _verdict(arm, outcome),
        )
        for arm, spread in outcome.arms.items()
    ]
    cells += [(tuner.name(plan), None, None, FAILED) for plan in outcome.failed]
    rows = [dict(zip(names, each, strict=True)) for each in cells]
    noisy = [NOISY] if outcome.is_noisy else []
    return "\n".join([tables.printed(Table(title=title, rows=rows)), *noisy])


def notes(problem: Problem, outcome: Outcome) -> list[str]:
    """Returns what is wrong with the times of a problem, for a result file."""
    reasons = dict.fromkeys(outcome.wrong, WRONG) | dict.fromkeys(
        outcome.failed, FAILED
    )
    found = [f"{tuner.name(plan)}: {reason}" for plan, reason in reasons.items()]
    found += [NOISY] if outcome.is_noisy else []
    return [f"{problem.explain()}: {each}" for each in found]


def conclusion(outcomes: Sequence[Outcome], file: Path) -> str:
    """Returns where results are kept, and who serves the problems without a result."""
    noisy = sum(each.is_noisy for each in outcomes)
    kept = sum(each.result is not None for each in outcomes)
    failed, of = len(outcomes) - kept - noisy, f"of {len(outcomes)} problems"
    lines = []
    if failed:
        served = (
            "stock MLX serves them"
            if guard.is_on()
            else f"set {guard.ENVIRONMENT}=1 to have stock MLX serve them"
        )
        lines.append(f"all our plans of {failed} {of} failed: {served}")
    if noisy:
        lines.append(f"{noisy} {of}: {NOISY}")
    return "\n".join([*lines, f"kept in {file}" if kept else "nothing was kept"])


def _verdict(arm: Arm, outcome: Outcome) -> str:
    parts = ["the model's answer"] if arm == next(iter(outcome.arms)) else []
    if arm in outcome.wrong:
        parts.append(WRONG)
    result = outcome.result
    if result and arm == (None if result.stock else result.plan):
        parts.append("used from now on")
    return ", ".join(parts)
