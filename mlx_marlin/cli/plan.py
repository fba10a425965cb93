"""`mlx-marlin plan`: shows the plan of a product, in text and pictures."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_marlin.backends import planner, registry
from mlx_marlin.cli import arguments, output
from mlx_marlin.cli.arguments import add_chip, device
from mlx_marlin.cli.pictures import charts, figures, plan_picture, text
from mlx_marlin.planning.epilogue import ACTIVATIONS, Epilogue
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Choice
from mlx_marlin.planning.work.tiles import REDUCTIONS
from mlx_marlin.planning.work.work import PARTITIONS, STRATEGIES, Strategy

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
    add_problem(parser)
    add_overrides(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--all",
        action="store_true",
        help="show all candidates, and diagrams of the best plan of each strategy",
    )
    output.add_json(group)
    group.add_argument(
        "--save", type=Path, metavar="FILE", help="save the diagrams as .svg or .png"
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save a chart of the time against rows as .svg or .png",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns 0."""
    for path, option in ((args.save, "--save"), (args.plot, "--plot")):
        if path:
            output.check_file(path, option)  # before planning
    overrides = overridden(args)
    choice = planner.compare(
        problem(args), device=device(args.chip, args.cores), **overrides
    )
    # Planning every strategy takes time, so it is done only for the output.
    is_text = not output.is_json(args)
    drawn = args.all and (args.save or is_text)
    shown, missing = _each_strategy(choice, overrides) if drawn else ([choice], [])
    if args.save:
        _check_drawn(args.save, shown)
        figures.save(args.save, "--save", lambda: plan_picture.figure(shown))
    if args.plot:
        _plot(args.plot, choice, overrides)
    if args.json:
        output.write_json(args, _figures(choice, args.all))
    if not is_text:
        return 0
    print(explanation(choice))
    if args.all:
        print(f"\ncompared, times in us (model, not measured)\n{choice.table()}")
    for drawn_choice in shown:
        if args.all:
            print(f"\n{heading(drawn_choice)}")
        print(f"\n{pictures(drawn_choice)}")
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
    _, prediction, plan = candidate
    backend = registry.of_device(choice.device)
    reason = backend.handover(plan.problem, choice.device, plan)
    return replace(choice, plan=plan, prediction=prediction, reason=reason)


def _figures(choice: Choice, with_candidates: bool) -> dict[str, Any]:
    """Returns the choice as values for JSON."""
    figures = {"problem": asdict(choice.plan.problem)} | choice.figures()
    if with_candidates:
        figures["candidates"] = [
            _as_chosen(choice, candidate).figures() for candidate in choice.candidates
        ]
    return figures


def _check_drawn(path: Path, choices: Sequence[Choice]) -> None:
    for choice in choices:
        if too_large := text.why_not_drawn(choice.plan):
            raise ValueError(f"--save {path}: {too_large}")


def _plot(path: Path, choice: Choice, overrides: PlanOverrides) -> None:
    """Saves the time against rows."""
    problem = choice.plan.problem
    shape = f"{problem.k}→{problem.n}, {problem.mode} {problem.bits}-bit"
    chart = charts.staircase(
        f"time against rows, {shape}, {choice.device.variant} (predicted)",
        [*charts.predicted_samples(problem, choice.device, **overrides)],
    )
    if chart is None:
        raise ValueError(
            f"--plot {path}: expected a plan for more than one number of rows"
        )
    figures.save(path, "--plot", lambda: figures.figure([chart]))


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the product that is planned."""
    group = parser.add_argument_group("product")
    arguments.add_format(group)
    arguments.add_dtype(group)
    arguments.add_layout(group, default="mlx")
    group.add_argument(
        "--batch", type=int, default=1, help="products with different weights"
    )
    group.add_argument(
        "--invariant",
        action="store_true",
        help="require results of a row that do not depend on M",
    )
    epilogue = parser.add_argument_group("epilogue")
    epilogue.add_argument("--bias", action="store_true", help="add a bias")
    epilogue.add_argument(
        "--activation", default="none", choices=ACTIVATIONS, help="default: none"
    )
    epilogue.add_argument(
        "--multiply", action="store_true", help="multiply by an array"
    )
    epilogue.add_argument(
        "--residual", action="store_true", help="add an array at the end"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the options that set fields of the plan."""
    group = parser.add_argument_group("overrides of the plan")
    group.add_argument("--kernel", choices=registry.kernels(), help="the kernel")
    group.add_argument(
        "--strategy", choices=STRATEGIES, help="how tiles and k are divided"
    )
    group.add_argument("--partition", choices=PARTITIONS, help="how ranges are rounded")
    group.add_argument("--k-parallel", type=int, help="slices of k")
    group.add_argument(
        "--threadgroups", type=int, dest="num_threadgroups", help="threadgroups"
    )
    group.add_argument("--whole", type=int, help="leading tiles that are not split")
    group.add_argument("--minimum", type=int, help="minimum k tiles of a split")
    group.add_argument("--groups", type=int, help="groups of neighbouring ranges")
    group.add_argument(
        "--reduction", choices=REDUCTIONS, help="how splits of a tile are added"
    )
    group.add_argument("--simdgroups-k", type=int, help="simdgroups that share k")
    group.add_argument("--simdgroups-n", type=int, help="tiles in a wide tile of hytis")
    group.add_argument("--buffers", type=int, help="pipeline stages of gemm_staged")
    group.add_argument(
        "--loaders", type=int, help="simdgroups of gemm_staged that only load"
    )


def problem(args: argparse.Namespace) -> Problem:
    """Returns the product that the arguments describe."""
    m, n, k = arguments.product("x".join(args.shape))
    return arguments.problem(
        args,
        *(m, n, k),
        args.layout or "mlx",
        epilogue=Epilogue(
            bias=args.bias,
            activation=args.activation,
            multiply=args.multiply,
            residual=args.residual,
        ),
        invariant=args.invariant,
        batch=args.batch,
    )


def overridden(args: argparse.Namespace) -> PlanOverrides:
    """Returns the fields of the plan that the arguments set."""
    overrides = PlanOverrides()
    for field in PlanOverrides.__optional_keys__ & vars(args).keys():
        if (value := getattr(args, field)) is not None:
            overrides[field] = value  # type: ignore[literal-required]
    return overrides


def explanation(choice: Choice) -> str:
    """Returns everything except the diagrams, as lines of text."""
    chip = choice.device
    lines = [
        f"problem   {choice.plan.problem.explain()}",
        f"device    {chip.variant}: {chip.figures}",
        f"plan      {choice.plan.explain()}",
        f"cost      {choice.prediction.explain()}",
        f"served by {_server(choice)}",
    ]
    return "\n".join(lines)


def _server(choice: Choice) -> str:
    """Returns who serves the product and why."""
    problem = choice.plan.problem
    if choice.reason:
        return f"stock MLX: {choice.reason}"
    if problem.layout != "mlx":
        return "this plan: stock MLX cannot read a packed weight"
    if problem.invariant:
        return "this plan: stock MLX's bits of a row depend on the number of rows"
    return "this plan, where nobody has measured"


def pictures(choice: Choice) -> str:
    """Returns the diagrams of a plan as text, or why it is not drawn."""
    too_large = text.why_not_drawn(choice.plan)
    if too_large is not None:
        return too_large
    return f"{text.tile_map(choice.plan)}\n\n{text.timeline(choice)}"


def heading(choice: Choice) -> str:
    """Returns the heading of the diagrams of a strategy's best plan."""
    seconds = choice.prediction.seconds
    return (
        f"# {choice.plan.strategy}, {seconds * 1e6:.1f} us (model, not measured)\n"
        f"{choice.plan.explain()}"
    )
