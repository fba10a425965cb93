"""Writes the README's table of measured results from the files in benchmarks/results.

Usage: python -m benchmarks.results [--check]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_marlin.measure import result_file
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import CHAIN, OURS, STOCK

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN = "<!-- measured results: python -m benchmarks.results -->"
END = "<!-- end of measured results -->"
"""What the README has before and after the table."""
NONE = (
    "No result file from a Mac exists yet: nothing has been measured on Apple "
    "hardware. [`make mac`](docs/first-mac.md) makes one in ten minutes."
)
ROWS = (1, 4, 8, 16, 32, 64, 512)
"""Rows that have a column."""
LAYOUT = "mlx"
"""Layout of the weight that our kernels read: that of `optimize` on a Mac."""


def read_all(folder: Path) -> list[ResultFile]:
    """Returns the results of a folder, by the names of their files.

    Raises:
        ValueError: If a file is not a result file, has predicted times, or those of a
            paravirtual device.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        result = result_file.read(path)
        if result.is_paravirtual:
            raise ValueError(f"{path.name} has times of a paravirtual device")
        if not result.is_measured:
            raise ValueError(f"{path.name} has predicted times, or none")
        results.append(result)
    return results


def section(results: Sequence[ResultFile]) -> str:
    """Returns the README's table, or a sentence if there are no results."""
    if not results:
        return NONE
    head = [*("chip, cores", "date", "MLX", "product, format"), *map(str, ROWS)]
    lines = [
        "Microseconds of a product in a chain, ours / `mx.quantized_matmul`, by rows; "
        "weights in MLX's layout:",
        "",
        _line(head),
        "|---" * len(head) + "|",
    ]
    for result in results:
        lines += map(_line, _products(result))
    return "\n".join(lines)


def _products(result: ResultFile) -> list[list[str]]:
    """Returns the cells of a result's lines, one for each weight."""
    times: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in result.products:
        problem = row.problem
        if row.clock != CHAIN or problem.layout != LAYOUT:
            continue
        format = f"{problem.mode} {problem.bits}-bit g{problem.group_size}"
        weight = f"{problem.k}→{problem.n}", f"{format} {problem.dtype}"
        by_arm = times.setdefault(weight, {}).setdefault(problem.m, {})
        by_arm.setdefault(row.arm, row.timing.seconds * 1e6)
    machine = result.machine
    return [
        [
            f"{machine.chip}, {machine.cores}",
            result.date,
            machine.mlx,
            ", ".join(weight),
            *(_cell(by_rows.get(m, {})) for m in ROWS),
        ]
        for weight, by_rows in times.items()
    ]


def _cell(by_arm: dict[str, float]) -> str:
    if OURS not in by_arm or STOCK not in by_arm:
        return ""
    return f"{by_arm[OURS]:.3g} / {by_arm[STOCK]:.3g}"


def _line(cells: Sequence[str]) -> str:
    """Returns a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def replaced(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns a text with the part between its markers replaced.

    Args:
        text: The text.
        table: What stands between the markers afterwards.
        begin: What the text has before it.
        end: What the text has after it.

    Raises:
        ValueError: If the text does not have both markers once, in order.
    """
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or begin in rest or end in after:
        raise ValueError(f"expected {begin} and {end} once, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(given: Sequence[str] | None = None) -> int:
    """Writes the table; with --check returns 1 if it is not up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, compare only"
    )
    args = parser.parse_args(given)
    text = README.read_text(encoding="utf-8")
    wanted = replaced(text, section(read_all(FOLDER)))
    if args.check:
        command = "run python -m benchmarks.results"
        print("up to date" if wanted == text else command)
        return int(wanted != text)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
