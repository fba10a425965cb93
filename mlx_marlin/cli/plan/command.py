"""`mlx-marlin plan MxNxK`: shows the plan of a matrix product."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_marlin.backends import planner, registry
from mlx_marlin.cli import json_output
from mlx_marlin.cli.arguments import add_chip, device
from mlx_marlin.cli.pictures import (
    busy_cores,
    figures,
    files,
    plan_picture,
    plots,
    staircase,
    text,
)
from mlx_marlin.cli.plan import arguments, explanation
from mlx_marlin.planning.choice import Candidate, Choice
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.work.work import STRATEGIES, Strategy

DESCRIPTION = """
Show the plan of y[M, N] = x[M, K] @ W[N, K]^T with a quantized weight W: the kernel,
the division of the work, and the predicted time. All times are from a cost model.
"""
EPILOG = """
examples:
  mlx-marlin plan 8x4096x11008
  mlx-marlin plan 8x4096x11008 --chip "M3 Max" --all
  mlx-marlin plan 1x4096x4096 --mode mxfp4 --layout marlin --save plan.svg
  mlx-marlin plan 8x4096x11008 --chip "M3 Max" --plot rows.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "shape",
        nargs="+",
        metavar="MxNxK",
        help="rows of x, and rows and columns of the weight; also M N K",
    )
    add_chip(parser, "plan")
    parser.add_argument(
        "--cores", type=int, help="GPU cores; default: the chip's maximum"
    )
    arguments.add_problem(parser)
    arguments.add_overrides(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--all",
        action="store_true",
        help="show all candidates, and diagrams of the best plan of each strategy",
    )
    json_output.add_option(output)
    output.add_argument(
        "--save", type=Path, metavar="FILE", help="save the diagrams as .svg or .png"
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save charts as .svg or .png: time against rows, and busy cores of the "
        "best plan of each strategy",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns 0."""
    for path, option in ((args.save, "--save"), (args.plot, "--plot")):
        if path:
            files.check(path, option)  # before planning
    overrides = arguments.overrides(args)
    choice = planner.compare(
        arguments.problem(args), device=device(args.chip, args.cores), **overrides
    )
    # Planning every strategy takes time, so it is done only for the output.
    is_text = not json_output.is_printed(args)
    drawn = args.all and (args.save or is_text)
    shown, missing = _each_strategy(choice, overrides) if drawn else ([choice], [])
    if args.save:
        _check_drawn("--save", args.save, shown)
        figures.save(args.save, "--save", lambda: plan_picture.figure(shown))
    if args.plot:
        _plot(args.plot, choice, overrides)
    if args.json:
        json_output.write(args, _figures(choice, args.all))
    if not is_text:
        return 0
    print(explanation.explanation(choice))
    if args.all:
        print(f"\ncompared, times in us (model, not measured)\n{choice.table()}")
    for drawn_choice in shown:
        if args.all:
            print(f"\n{explanation.heading(drawn_choice)}")
        print(f"\n{explanation.pictures(drawn_choice)}")
    for line in missing:
        print(f"\n{line}")
    for path in (args.save, args.plot):
        if path:
            print(f"\nsaved {path}")
    return 0


def _each_strategy(
    choice: Choice, overrides: PlanOverrides
) -> tuple[list[Choice], list[str]]:
    """Returns the best plan of each strategy, and why other strategies have none."""
    shown, missing = [], []
    for strategy in [overrides["strategy"]] if "strategy" in overrides else STRATEGIES:
        try:
            shown.append(_best_of_strategy(choice, strategy, overrides))
        except ValueError as error:
            missing.append(f"{strategy}: no plan, {error}")
    return shown, missing


def _best_of_strategy(
    choice: Choice, strategy: Strategy, overrides: PlanOverrides
) -> Choice:
    """Returns the best candidate of a strategy; plans it if there is no candidate."""
    for candidate in choice.candidates:
        if candidate.plan.strategy == strategy:
            return _as_chosen(choice, candidate)
    return planner.compare(
        choice.plan.problem,
        device=choice.device,
        **overrides | PlanOverrides(strategy=strategy),
    )


def _as_chosen(choice: Choice, candidate: Candidate) -> Choice:
    """Returns the choice with a candidate in place of the chosen plan."""
    prediction = candidate.prediction
    backend = registry.of_device(choice.device)
    reason = backend.handover(choice.plan.problem, choice.device, lambda: prediction)
    return replace(choice, plan=candidate.plan, prediction=prediction, reason=reason)


def _figures(choice: Choice, with_candidates: bool) -> dict[str, Any]:
    """Returns the choice as values for JSON."""
    figures = {"problem": asdict(choice.plan.problem)} | choice.figures()
    if with_candidates:
        figures["candidates"] = [
            _as_chosen(choice, candidate).figures() for candidate in choice.candidates
        ]
    return figures


def _check_drawn(option: str, path: Path, choices: Sequence[Choice]) -> None:
    for choice in choices:
        if too_large := text.why_not_drawn(choice.plan):
            raise ValueError(f"{option} {path}: {too_large}")


def _plot(path: Path, choice: Choice, overrides: PlanOverrides) -> None:
    """Saves the time against rows, and the busy cores of each strategy."""
    shown, _ = _each_strategy(choice, overrides)
    _check_drawn("--plot", path, shown)
    problem = choice.plan.problem
    shape = f"{problem.k}→{problem.n}, {problem.mode} {problem.bits}-bit"
    times = staircase.chart(
        f"time against rows, {shape}, {choice.device.variant} (predicted)",
        [*staircase.predicted(problem, choice.device, **overrides)],
    )
    charts = [*filter(None, [times]), *busy_cores.charts(shown)]
    figures.save(path, "--plot", lambda: plots.figure(charts))
