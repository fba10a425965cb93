"""Writes the tables of docs/speculation.md: rows, and the draft length that pays.

All times are the cost model's, of the products of a pass alone: an 8B Llama that a 1B
one drafts for, 4-bit weights in groups of 64 in MLX's layout, float16.

Usage: python -m benchmarks.speculation [--check]
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.document_table import ROOT, DocumentTable, markdown
from benchmarks.predicted import MODELS, Model, problems, totals, transformer
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device, chips
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.planning.problem import Problem

DOCUMENT = ROOT / "docs" / "speculation.md"
TABLE = DocumentTable("predicted times", "benchmarks.speculation")
TARGET = MODELS[0]
DRAFT = transformer(
    "Llama 1B",
    hidden=2048,
    inner=8192,
    layers=16,
    queries=2048,
    keys=512,
    vocabulary=128256,
)
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Rows that have a column."""
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptance rates that have a column."""
LONGEST = 15
"""Draft lengths that are compared: up to 16 rows are verified."""


@dataclass(frozen=True, slots=True)
class Pays:
    """The draft length that pays most.

    Attributes:
        length: Drafted tokens of a step; 0 if drafting does not pay.
        speedup: Tokens per second, as a multiple of decoding without a draft.
    """

    length: int
    speedup: float


def expected_tokens(rate: float, length: int) -> float:
    """Returns the mean number of tokens that a step yields.

    A step yields the drafted tokens up to the first that is rejected, and one of the
    verifying model: 1 + rate + ... + rate**length (Leviathan, Kalman and Matias 2023,
    equation 1).

    Args:
        rate: Probability that a drafted token is accepted, 0 to 1.
        length: Drafted tokens.
    """
    return sum(rate**i for i in range(length + 1))


def speedup(rate: float, length: int, seconds: Sequence[float], draft: float) -> float:
    """Returns the tokens per second, as a multiple of decoding without a draft.

    Args:
        rate: Probability that a drafted token is accepted.
        length: Drafted tokens.
        seconds: Seconds of a pass of the verifying model, by rows; the first is that
            of plain decoding and is not read otherwise.
        draft: Seconds of a pass of the draft model with one row.
    """
    step = length * draft + seconds[length + 1]
    return expected_tokens(rate, length) * seconds[0] / step


def best(rate: float, seconds: Sequence[float], draft: float) -> Pays:
    """Returns the length with the highest `speedup`; 0 is plain decoding."""
    lengths = range(1, len(seconds) - 1)
    tried = [Pays(length, speedup(rate, length, seconds, draft)) for length in lengths]
    return max([Pays(0, 1.0), *tried], key=lambda pays: pays.speedup)


def devices() -> Iterator[Device]:
    """Yields each chip with its largest GPU."""
    for variants in chips().values():
        yield max(variants, key=lambda device: device.cores)


@cache
def pass_seconds(device: Device) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of a pass of 1 to 16 rows, by who verifies."""
    rows = range(1, LONGEST + 2)
    both = [totals(TARGET, m, device) for m in rows]
    return {
        "stock MLX": tuple(stock for stock, _ in both),
        "ours": tuple(ours for _, ours in both),
        "invariant": tuple(invariant_seconds(TARGET, m, device) for m in rows),
    }


def invariant_seconds(model: Model, rows: int, device: Device) -> float:
    """Returns the seconds of a pass with `invariant=True`."""
    return sum(
        count * _invariant_product(replace(problem, invariant=True), device)
        for count, problem in problems(model, rows)
    )


def _invariant_product(problem: Problem, device: Device) -> float:
    return planner.predict(planner.choose(problem, device), device).seconds


def tables() -> str:
    """Returns both tables of the document."""
    return f"{rows_table()}\n\n{lengths_table()}"


def rows_table() -> str:
    """Returns the milliseconds of a pass, by chip and rows."""
    lines = [
        [
            _name(device),
            *(
                " / ".join(f"{times[m - 1] * 1e3:.3g}" for times in by_server.values())
                for m in ROWS
            ),
        ]
        for device in devices()
        for by_server in (pass_seconds(device),)
    ]
    return markdown(["chip, rows", *map(str, ROWS)], lines)


def lengths_table() -> str:
    """Returns draft length and speed-up, by chip, who verifies and acceptance rate."""
    lines = [
        [_name(device), server, *(_cell(rate, device, times) for rate in RATES)]
        for device in devices()
        for server, times in pass_seconds(device).items()
    ]
    return markdown(["chip", "verified by", *(f"{rate:.0%}" for rate in RATES)], lines)


def _cell(rate: float, device: Device, times: Sequence[float]) -> str:
    plain = pass_seconds(device)["ours"][0]
    pays = best(rate, (plain, *times), totals(DRAFT, 1, device)[1])
    return f"{pays.length}: {pays.speedup:.2f}" if pays.length else "0"


def _name(device: Device) -> str:
    sample = stock_prediction(Problem(m=8, n=4096, k=4096), device)
    return f"{device.name.removeprefix('Apple ')}{'' if sample.calibrated else '*'}"


def main(given: Sequence[str] | None = None) -> int:
    """Writes the tables; with --check returns 1 if they are not up to date."""
    return TABLE.main(DOCUMENT, tables, __doc__.splitlines()[0], given)


if __name__ == "__main__":
    sys.exit(main())
