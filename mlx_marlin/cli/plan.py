"""`mlx-marlin plan M N K`: the plan of a product, in words and as a picture."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from mlx_marlin import device, scheduler
from mlx_marlin.device import Device
from mlx_marlin.formats import DTYPE_BYTES, LAYOUTS
from mlx_marlin.plan import KERNELS, PARTITIONS, STRATEGIES, Plan
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler import Wishes

SHOWN = 12
"""Tiles shown of a row or column, and threadgroups of the list; more are elided."""
GAP = "..."


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "plan",
        description="Show how y[M, N] = x[M, K] @ W[N, K]^T would be computed.",
    )
    parser.add_argument("m", type=int, metavar="M", help="rows of x")
    parser.add_argument("n", type=int, metavar="N", help="rows of the weight")
    parser.add_argument("k", type=int, metavar="K", help="columns of the weight")
    parser.add_argument("--chip", help='such as "Apple M3 Max"; default: this machine')
    parser.add_argument("--cores", type=int, help="GPU cores, if not the chip's most")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--dtype", default="float16", choices=list(DTYPE_BYTES))
    parser.add_argument("--layout", default="mlx", choices=LAYOUTS)
    parser.add_argument("--kernel", choices=KERNELS)
    parser.add_argument("--strategy", choices=STRATEGIES)
    parser.add_argument("--partition", choices=PARTITIONS)
    parser.add_argument("--k-parallel", type=int, help="slices of k")
    parser.add_argument("--threadgroups", type=int, dest="num_threadgroups")


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns 0."""
    problem = Problem(
        m=args.m,
        n=args.n,
        k=args.k,
        group_size=args.group_size,
        dtype=args.dtype,
        scale_dtype=args.dtype,
        layout=args.layout,
    )
    chip = _device(args.chip, args.cores)
    plan = scheduler.make(problem, device=chip, **_wishes(args))
    stock = scheduler.stock_reason(problem, chip)
    print(f"problem   {problem.explain()}")
    print(
        f"device    {chip.variant}: {chip.cores} cores, {chip.bandwidth_gbs:g} GB/s, "
        f"{chip.clock_ghz:g} GHz"
    )
    print(f"plan      {plan.explain()}")
    print(f"cost      {scheduler.predict(plan, chip).explain()}")
    print(f"served by {f'stock MLX: {stock}' if stock else 'this plan'}")
    print(f"\n{picture(plan)}\n\n{runs(plan)}")
    return 0


def picture(plan: Plan) -> str:
    """Draws the tiles of the result, each with the threadgroups that compute it.

    Args:
        plan: The plan to draw.

    Returns:
        Lines of text, one for each row of tiles; long rows and columns are elided.
    """
    columns = _ends(plan.n_tiles)
    lines = [["", *(GAP if col is None else f"col {col}" for col in columns)]]
    for row in _ends(plan.m_tiles):
        if row is None:
            lines.append([GAP] * (len(columns) + 1))
            continue
        owners = (GAP if col is None else _owners(plan, row, col) for col in columns)
        lines.append([f"row {row}", *owners])
    return "threadgroups of each tile\n" + _aligned(lines)


def runs(plan: Plan) -> str:
    """Lists which units each threadgroup owns, elided in the middle."""
    lines = [["threadgroup", "units", "first", "last"]]
    for index in _ends(plan.num_threadgroups):
        if index is None:
            lines.append([GAP] * 4)
            continue
        begin, end = plan.range(index)
        ends = [str(begin), str(end - 1)] if end > begin else ["idle", ""]
        lines.append([str(index), str(end - begin), *ends])
    return _aligned(lines)


def _device(name: str | None, cores: int | None) -> Device:
    """Returns the chip to plan for: a named one, or this machine's."""
    if name is not None:
        return Device.named(name, cores)
    here = device.current()
    if cores is None:
        return here
    return replace(here, cores=cores, variant=f"{here.name} with {cores} GPU cores")


def _wishes(args: argparse.Namespace) -> Wishes:
    """Returns the fields of the plan that the user gave."""
    wishes = Wishes()
    for field in Wishes.__optional_keys__ & vars(args).keys():
        if (value := getattr(args, field)) is not None:
            wishes[field] = value  # type: ignore[literal-required]
    return wishes


def _owners(plan: Plan, row: int, col: int) -> str:
    """Returns the threadgroup of a tile, or the first and last of its slices."""
    first = (col * plan.m_tiles + row) * plan.k_parallel
    owners = plan.owner(first), plan.owner(first + plan.k_parallel - 1)
    return f"{owners[0]}" if owners[0] == owners[1] else f"{owners[0]}-{owners[1]}"


def _ends(count: int) -> list[int | None]:
    """Returns 0 .. count - 1; None stands for the middle of a long list."""
    if count <= SHOWN:
        return list(range(count))
    half = SHOWN // 2
    return [*range(half), None, *range(count - half, count)]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns the cells in columns, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)
    return "\n".join(rows)
