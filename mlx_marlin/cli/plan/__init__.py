"""`mlx-marlin plan M N K`: shows the plan of a matrix product."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_marlin.backends import devices, planner, registry
from mlx_marlin.cli.pictures import busy_cores, files, staircase, text
from mlx_marlin.planning.choice import Candidate, Choice
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import ACTIVATIONS, Epilogue
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.work import PARTITIONS, STRATEGIES, Strategy
from mlx_marlin.planning.work.tiles import REDUCTIONS
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, MODES

DESCRIPTION = """
Show the plan of y[M, N] = x[M, K] @ W[N, K]^T with a quantized weight W: the kernel,
the division of the work, and the predicted time. All times are from a cost model.
"""
EPILOG = """
examples:
  mlx-marlin plan 8 4096 11008
  mlx-marlin plan 8 4096 11008 --chip "M3 Max" --all
  mlx-marlin plan 1 4096 4096 --mode mxfp4 --layout marlin --save plan.svg
  mlx-marlin plan 8 4096 11008 --chip "M3 Max" --plot rows.png
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the arguments of the command."""
    parser = subparsers.add_parser(
        "plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("m", type=int, metavar="M", help="rows of x")
    parser.add_argument("n", type=int, metavar="N", help="rows of the weight")
    parser.add_argument("k", type=int, metavar="K", help="columns of the weight")
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help='chip to plan for, such as "M3 Max" or "H200"; default: this machine',
    )
    parser.add_argument(
        "--cores", type=int, help="GPU cores; default: the chip's maximum"
    )
    _add_problem(parser)
    _add_overrides(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--all",
        action="store_true",
        help="show all candidates, and diagrams of the best plan of each strategy",
    )
    output.add_argument("--json", action="store_true", help="print JSON")
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
    overrides = _overrides(args)
    choice = planner.compare(
        _problem(args), device=_device(args.chip, args.cores), **overrides
    )
    # Planning every strategy takes time, so it is done only for the output.
    drawn = args.all and (args.save or not args.json)
    shown, missing = _each_strategy(choice, overrides) if drawn else ([choice], [])
    if args.save:
        from mlx_marlin.cli.pictures import drawing

        drawing.save(args.save, shown)
    if args.plot:
        _plot(args.plot, choice, overrides)
    if args.json:
        print(json.dumps(_figures(choice, args.all), indent=2))
        return 0
    print(_explanation(choice))
    if args.all:
        print(f"\ncompared, times in us (model, not measured)\n{choice.table()}")
    for drawn_choice in shown:
        if args.all:
            print(f"\n{_heading(drawn_choice)}")
        print(f"\n{_pictures(drawn_choice)}")
    for line in missing:
        print(f"\n{line}")
    for path in (args.save, args.plot):
        if path:
            print(f"\nsaved {path}")
    return 0


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("product")
    group.add_argument(
        "--mode", default="affine", choices=MODES, help="default: affine"
    )
    group.add_argument("--bits", type=int, help="bits of a code; default: the mode's")
    group.add_argument("--group-size", type=int, help="default: the mode's")
    group.add_argument(
        "--dtype",
        default="float16",
        choices=list(DTYPE_BYTES),
        help="dtype of activations; default: float16",
    )
    group.add_argument(
        "--layout",
        default="mlx",
        choices=LAYOUTS,
        help="layout of the weight; default: mlx",
    )
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


def _add_overrides(parser: argparse.ArgumentParser) -> None:
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


def _problem(args: argparse.Namespace) -> Problem:
    return problem_of(
        args.m,
        args.n,
        args.k,
        mode=args.mode,
        bits=args.bits,
        group_size=args.group_size,
        dtype=args.dtype,
        layout=args.layout,
        epilogue=Epilogue(
            bias=args.bias,
            activation=args.activation,
            multiply=args.multiply,
            residual=args.residual,
        ),
        invariant=args.invariant,
        batch=args.batch,
    )


def _device(name: str | None, cores: int | None) -> PlanningDevice:
    """Returns the device to plan for."""
    if name is not None:
        return devices.named(name, cores)
    here = devices.current()
    if cores is None:
        return here
    changed: PlanningDevice = registry.of_device(here).with_cores(here, cores)
    return changed


def _overrides(args: argparse.Namespace) -> PlanOverrides:
    """Returns the fields of the plan that the arguments set."""
    overrides = PlanOverrides()
    for field in PlanOverrides.__optional_keys__ & vars(args).keys():
        if (value := getattr(args, field)) is not None:
            overrides[field] = value  # type: ignore[literal-required]
    return overrides


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


def _plot(path: Path, choice: Choice, overrides: PlanOverrides) -> None:
    """Saves the time against rows, and the busy cores of each strategy."""
    from mlx_marlin.cli.pictures import plots

    shown, _ = _each_strategy(choice, overrides)
    for each in shown:
        if too_large := text.why_not_drawn(each.plan):
            raise ValueError(f"--plot {path}: {too_large}")
    problem = choice.plan.problem
    shape = f"{problem.k}→{problem.n}, {problem.mode} {problem.bits}-bit"
    times = staircase.chart(
        f"time against rows, {shape}, {choice.device.variant} (predicted)",
        [*staircase.predicted(problem, choice.device, **overrides)],
    )
    charts = [*filter(None, [times]), *busy_cores.charts(shown)]
    plots.save(path, "--plot", charts)


def _explanation(choice: Choice) -> str:
    """Returns everything except the diagrams, as lines of text."""
    chip = choice.device
    lines = [
        f"problem   {choice.plan.problem.explain()}",
        f"device    {chip.variant}: {chip.figures}",
        f"plan      {choice.plan.explain()}",
        f"cost      {choice.prediction.explain()}",
        f"stock     {_stock(choice)}",
        f"served by {_server(choice)}",
    ]
    return "\n".join(lines)


def _stock(choice: Choice) -> str:
    if choice.stock is None:
        return "no model of stock MLX on this device"
    return choice.stock.explain().removeprefix("stock MLX: ")


def _server(choice: Choice) -> str:
    """Returns who serves the product and why."""
    problem = choice.plan.problem
    if choice.reason:
        return f"stock MLX: {choice.reason} (model, not measured)"
    if choice.stock is None:
        return "this plan"
    if problem.layout != "mlx":
        return "this plan: stock MLX cannot read a packed weight"
    if problem.invariant:
        return "this plan: stock MLX's bits of a row depend on the number of rows"
    stock = registry.of_device(choice.device).stock_seconds(problem, choice.device)
    if stock is None:
        return "this plan"
    ratio = stock / choice.prediction.seconds
    kernel = choice.stock.call.kernel
    return f"this plan: {ratio:.2f} times as fast as {kernel} (model, not measured)"


def _pictures(choice: Choice) -> str:
    too_large = text.why_not_drawn(choice.plan)
    if too_large is not None:
        return too_large
    return f"{text.tile_map(choice.plan)}\n\n{text.timeline(choice)}"


def _heading(choice: Choice) -> str:
    seconds = choice.prediction.seconds
    return (
        f"# {choice.plan.strategy}, {seconds * 1e6:.1f} us (model, not measured)\n"
        f"{choice.plan.explain()}"
    )
