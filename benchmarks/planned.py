"""Lists the plan and the server of the products of `predicted.py`, one line each.

The products are those of the models in `predicted.py` at the numbers of rows that have
a bound there, 8 and 16. All times are a model's, not measured.

Usage: python benchmarks/planned.py [CHIP ...]
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import problem_of

PREDICTED = runpy.run_path(str(Path(__file__).with_name("predicted.py")))
CHIPS = (*PREDICTED["CHIPS"], "Apple M3 Ultra", "Apple M5 Max")


def sizes() -> list[tuple[int, int]]:
    """Returns k and n of all products that are not an expert's."""
    models = (*PREDICTED["MODELS"], PREDICTED["MIXTURE"])
    return sorted({product[:2] for model in models for product in model.products})


def short(plan: Plan) -> str:
    """Returns kernel, simdgroups, strategy and threadgroups of a plan."""
    grid = "x".join(map(str, plan.simdgroup_grid))
    work = plan.work
    slices = f", {work.slices} slices of k" if work.slices > 1 else ""
    return f"{plan.kernel} {grid}, {work.strategy} {work.threadgroups}{slices}"


def lines(chip: str) -> Iterator[str]:
    """Yields a line for each product on a chip."""
    device = Device.named(chip)
    for k, n in sizes():
        for rows in PREDICTED["LEAST"]:
            problem = problem_of(rows, n, k)
            choice = planner.compare(problem, device=device)
            ours, stock = choice.prediction.seconds, choice.stock
            assert stock is not None
            served = "stock" if choice.reason else "ours"
            yield (
                f"{chip.removeprefix('Apple ')} | {rows} x {k}→{n} | "
                f"{short(choice.plan)} | {ours * 1e6:.1f} | {stock.seconds * 1e6:.1f} "
                f"| {served}"
            )


def main() -> int:
    print("Predicted by a model, not measured; times in us")
    print("chip | product | our plan | ours | stock MLX | served by")
    for chip in sys.argv[1:] or CHIPS:
        for line in lines(chip):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
