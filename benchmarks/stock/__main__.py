"""Writes `mlx_marlin/data/handover.json`: who serves where nobody has measured.

The table has a line for each chip, dtype and format. Of products of common sizes with a
weight in MLX's layout, it says with which rows our kernels serve and with which the
weight is decoded first: those for which most products of a size are won by the margin
that `decision` asks for, and none is predicted to be slower than with stock MLX.

Usage: python -m benchmarks.stock
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, takewhile
from typing import Any

from benchmarks.stock import decision, experts
from mlx_marlin.backends.metal.backend import FILE
from mlx_marlin.backends.metal.cost import dequantize_seconds
from mlx_marlin.backends.metal.device import Device, chips
from mlx_marlin.backends.metal.experts import gather_seconds
from mlx_marlin.planning.gather_plan import AnyProblem, GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS

NOTE = (
    "Written by python -m benchmarks.stock, from a model: nothing here was measured. "
    "ours: rows that our kernels serve, by the least columns of the weight; decoded: "
    "rows with which it is decoded first; experts: the least pairs per expert, and the "
    "most of sorted ones, below the least where there are none."
)
SHAPES = {
    512: ((512, 2048), (768, 2048), (896, 4864)),
    1024: ((1024, 4096), (2048, 2048), (2880, 2880)),
    3072: ((4096, 4096), (4096, 14336), (5120, 17408), (8192, 28672)),
    10240: ((14336, 4096), (17408, 5120), (151936, 1024)),
}
"""n and k of products, by the least n of those that they stand for. A weight with fewer
columns stays with stock MLX."""
STEPS = (*range(1, 18), 25, 33, 41, 49, 57, 65, 81, 97, 113, 129, 257, 513, 1025)
"""First rows of the ranges that are judged by their first and last rows."""
ENDS = (*(each - 1 for each in STEPS[1:]), 2048)
"""Last rows of the ranges; more rows are served as those of the last one."""
EXPERTS = ((8, 14336, 4096), (32, 2880, 2880), (64, 1024, 2048), (128, 768, 2048))
"""Numbers of experts, and n and k of their products."""
PAIRS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
"""Pairs per expert that are judged."""


def of_products(device: Device, dtype: str, mode: str, bits: int) -> dict[str, Any]:
    """Returns the table's line for products, and that for experts."""
    line: dict[str, Any] = {"ours": [], "decoded": []}
    for shapes in SHAPES.values():
        of_steps = [
            [
                problem_of(m, n, k, mode=mode, bits=bits, dtype=dtype)
                for n, k in shapes
                for m in {first, last}
            ]
            for first, last in zip(STEPS, ENDS, strict=True)
        ]
        for name, judges in WON.items():
            served = [_most(problems, device, *judges) for problems in of_steps]
            line[name].append(_ranges(served))
    if not any(line["decoded"]):
        del line["decoded"]
    return line | {"experts": of_experts(device, dtype, mode, bits)}


def _most(
    problems: Sequence[AnyProblem],
    device: Device,
    is_won: Callable[[Any, Device], bool],
    is_slower: Callable[[Any, Device], bool],
) -> bool:
    """Returns whether most problems are won, and none is slower than stock MLX."""
    lost = (each for each in problems if not is_won(each, device))
    if len([*islice(lost, (len(problems) + 1) // 2)]) * 2 >= len(problems):
        return False
    return not any(is_slower(each, device) for each in problems)


def _ours_slower(problem: Problem, device: Device) -> bool:
    return decision.speedup(problem, device) < 1


def _decoded_slower(problem: Problem, device: Device) -> bool:
    stock = decision.stock_seconds(problem, device)
    return dequantize_seconds(problem, device) > stock


def _experts_slower(gather: GatherProblem, device: Device) -> bool:
    return experts.stock_seconds(gather, device) < gather_seconds(gather, device)


WON = {
    "ours": (decision.by_our_kernels, _ours_slower),
    "decoded": (decision.is_decoded_first, _decoded_slower),
}
"""By what is served: whether it is won by the margin, and whether it is slower."""


def _ranges(served: Sequence[bool]) -> str:
    """Returns ranges of rows as text: "5-31 33-63", the last one perhaps open."""
    found: list[list[int | str]] = []
    for i, is_served in enumerate(served):
        if is_served and (i == 0 or not served[i - 1]):
            found.append([STEPS[i], ""])
        elif found and not is_served and served[i - 1]:
            found[-1][1] = STEPS[i] - 1
    return " ".join(f"{first}-{last}" for first, last in found)


def of_experts(device: Device, dtype: str, mode: str, bits: int) -> list[float]:
    """Returns the least pairs per expert of our kernel, and the most of sorted ones.

    The second number is below the first one where sorted pairs are never ours.
    """

    def is_won(pairs: float, is_sorted: bool) -> bool:
        gathers = [
            GatherProblem(
                problem=problem_of(
                    max(1, round(pairs * count)),
                    n,
                    k,
                    mode=mode,
                    bits=bits,
                    dtype=dtype,
                ),
                experts=count,
                is_sorted=is_sorted,
            )
            for count, n, k in EXPERTS
        ]
        return _most(gathers, device, experts.by_our_kernel, _experts_slower)

    least = next(each for each in PAIRS if is_won(each, False))
    kept = takewhile(lambda each: each < least or is_won(each, True), PAIRS)
    return [least, max(kept, default=0)]


def of_chip(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the table of a chip with the most cores: by dtype, by format."""
    formats = [each for each, found in FORMATS.items() if "mlx" in found.layouts]
    return {
        dtype: {
            f"{mode} {bits}": of_products(Device.named(name), dtype, mode, bits)
            for mode, bits in formats
        }
        for dtype in DTYPE_BYTES
    }


def text(names: Iterable[str], tables: Iterable[dict[str, Any]]) -> str:
    """Returns the file's text: a line for each chip, dtype and format."""
    body = []
    for name, dtypes in zip(names, tables, strict=True):
        of_dtypes = [
            f"{json.dumps(dtype)}: {{\n"
            + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in lines.items())
            + "}"
            for dtype, lines in dtypes.items()
        ]
        body.append(f"{json.dumps(name)}: {{\n" + ",\n".join(of_dtypes) + "}")
    head = f'{{"note": {json.dumps(NOTE)},\n"columns": {json.dumps([*SHAPES])},\n'
    return head + '"chips": {\n' + ",\n".join(body) + "}}\n"


def main() -> int:
    names = [variants[-1].name for variants in chips().values()]
    with ProcessPoolExecutor() as pool:
        FILE.write_text(text(names, pool.map(of_chip, names)), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
