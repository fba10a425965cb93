"""Published times of stock MLX beside those of our model of it.

Run as a program, this file prints the table of docs/stock_model.md.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published time of stock MLX, or its ratio to the time of other rows.

    Attributes:
        chip: Its name; a core count after a comma.
        source: The thread on MLX's GitHub.
        shape: k and n.
        m: Rows.
        value: Milliseconds, or the ratio.
        per: Rows of the product that a ratio is taken to; 0 for milliseconds.
        why: The note that sets it apart; empty if nothing does.
    """

    chip: str
    source: str
    shape: tuple[int, int]
    m: int
    value: float
    group_size: int = 64
    dtype: str = "float16"
    per: int = 0
    why: str = ""

    @property
    def device(self) -> Device:
        name, _, cores = self.chip.partition(", ")
        return Device.named(name, int(cores))

    def predicted(self) -> float:
        """The model's value."""
        time = self._seconds(self.m)
        return time / self._seconds(self.per) if self.per else time * 1e3

    def error(self) -> float:
        return self.predicted() / self.value - 1

    def _seconds(self, m: int) -> float:
        k, n = self.shape
        problem = Problem(
            m=m,
            n=n,
            k=k,
            group_size=self.group_size,
            dtype=self.dtype,
            scale_dtype=self.dtype,
        )
        return stock_prediction(problem, self.device).seconds

    def cells(self) -> str:
        """The row of the table."""
        unit, places = (f"x of m={self.per}", 2) if self.per else ("ms", 3)
        k, n = self.shape
        cells = [
            self.chip,
            self.source,
            f"{self.m} x {k}→{n}",
            str(self.group_size),
            f"{self.value:.{places}f} {unit}",
            f"{self.predicted():.{places}f}",
            f"{self.error():+.0%}",
            self.why,
        ]
        return "| " + " | ".join(cells) + " |"


def _rows(
    times: dict[int, float], why: dict[int, str] | str = "", **row: object
) -> list[Row]:
    """One row for each count of rows."""
    reason = why if isinstance(why, dict) else dict.fromkeys(times, why)
    return [
        Row(m=m, value=value, why=reason.get(m, ""), **row)  # type: ignore[arg-type]
        for m, value in times.items()
    ]


NOTES = {
    "a": "0.32.0 took `qmm_t` from 10 rows; 0.32.4 does from 13.",
    "b": "Before MLX split k for few rows. 0.32.4 takes `qmv_wide` here.",
    "c": "0.31 split k here. 0.32.4 takes `qmv_wide`.",
    "d": "Before MLX split k for few rows. 0.32.4 splits.",
    "e": "Method not stated; see below on the price of a split.",
    "f": "Synchronous calls: some 0.03 ms of overhead in both times, and scatter, such "
    "as 4096→6144 that takes longer for 3 rows than for 4.",
    "g": "One weight repeated, in cache: 1 row beats the stated bandwidth.",
    "h": "As g, and the same in 0.31.2, which had no `qmv_wide`.",
    "i": "As g, each product waiting for the last. At 8 rows 2.7 times faster than the "
    "other table of the same issue: no price of one kernel meets both.",
    "j": "Chip not fitted, and before 0.32.1, which changed the decode.",
    "k": "As j; this chip emulates bfloat16, which the price of `qmm_t` leaves out.",
    "l": "Chip not fitted; group size not stated, 64 assumed.",
    "m": "Chip not fitted.",
    "n": "30 cores inferred from 36 GB; before 0.32; an `mx.eval` a call, 0.2 to 0.3 "
    "ms in each time.",
    "o": "Chip not fitted, 0.31.2; an `mx.eval` a call, about 0.14 ms in each time.",
}
"""What sets a row apart: it is not a time of 0.32.4 on a chip that was fitted."""

MLP = (5120, 17408)
HEAD = (5120, 248320)
ROWS = [
    *_rows(
        {1: 0.129, 2: 0.129, 4: 0.165, 6: 0.263, 8: 0.323, 9: 0.405, 10: 0.508}
        | {12: 0.508, 14: 0.507, 16: 0.509, 17: 0.513, 24: 0.514, 32: 0.513, 33: 1.002},
        chip="M3 Max, 40",
        source="#3863",
        shape=MLP,
        group_size=128,
        why={10: "a", 12: "a"},
    ),
    *_rows(
        {1: 0.126, 3: 0.132},
        chip="M3 Max, 40",
        source="#3852",
        shape=MLP,
        group_size=128,
    ),
    Row(
        chip="M3 Max, 40",
        source="#3120",
        shape=(2560, 2560),
        m=12,
        value=0.079,
        why="b",
    ),
    Row(
        chip="M3 Max, 40",
        source="#3120",
        shape=(2560, 2560),
        m=12,
        value=0.055,
        why="c",
    ),
    Row(
        chip="M3 Max, 40",
        source="#3120",
        shape=(4096, 4096),
        m=16,
        value=0.155,
        why="d",
    ),
    Row(
        chip="M3 Max, 40",
        source="#3120",
        shape=(4096, 4096),
        m=16,
        value=0.117,
        why="e",
    ),
    *_rows(
        {64: 0.479, 96: 0.600, 128: 0.769, 160: 0.920, 192: 1.036, 256: 1.309},
        chip="M3 Max, 30",
        source="#3584",
        shape=(8192, 2048),
        why="n",
    ),
    *_rows(
        {1: 0.198, 2: 0.196, 3: 0.224, 4: 0.283, 5: 0.347, 8: 0.562, 10: 0.891}
        | {32: 0.891},
        chip="M4 Pro, 20",
        source="#3852",
        shape=MLP,
        group_size=128,
        why={10: "a"},
    ),
    *_rows(
        {1: 2.725, 2: 2.752, 3: 3.107, 4: 4.006, 5: 5.041, 8: 8.257},
        chip="M4 Pro, 20",
        source="#3852",
        shape=HEAD,
        group_size=128,
    ),
    *_rows(
        {2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69},
        chip="M4 Pro, 20",
        source="#3839",
        shape=(4096, 24576),
        dtype="bfloat16",
        per=1,
        why={3: "f"},
    ),
    *_rows(
        {2: 1.18, 3: 1.40, 4: 1.52, 6: 2.05, 8: 2.46},
        chip="M4 Pro, 20",
        source="#3839",
        shape=(12288, 4096),
        dtype="bfloat16",
        per=1,
        why="f",
    ),
    *_rows(
        {2: 1.25, 3: 1.48, 4: 1.14, 6: 1.47, 8: 1.73},
        chip="M4 Pro, 20",
        source="#3839",
        shape=(4096, 6144),
        dtype="bfloat16",
        per=1,
        why="f",
    ),
    *_rows(
        {2: 1.20, 3: 1.35, 4: 1.57, 6: 1.99, 8: 2.01},
        chip="M4 Pro, 20",
        source="#3839",
        shape=(4096, 4096),
        dtype="bfloat16",
        per=1,
        why="f",
    ),
    *_rows(
        {1: 0.041, 2: 0.076, 4: 0.134, 7: 0.218, 8: 0.252, 16: 0.260},
        chip="M3 Ultra, 80",
        source="#4265",
        shape=MLP,
        why={1: "g"} | dict.fromkeys((2, 4, 7, 8), "h") | {16: "g"},
    ),
    *_rows(
        {1: 0.060, 4: 0.060, 6: 0.077, 8: 0.094},
        chip="M3 Ultra, 80",
        source="#4265",
        shape=MLP,
        why="i",
    ),
    Row(
        chip="M1 Max, 32",
        source="#4216",
        shape=(6656, 19968),
        m=512,
        value=17.2,
        group_size=32,
        why="j",
    ),
    Row(
        chip="M1 Max, 32",
        source="#4216",
        shape=(6656, 19968),
        m=512,
        value=30.6,
        group_size=32,
        dtype="bfloat16",
        why="k",
    ),
    *_rows(
        {1: 0.093},
        chip="M5, 10",
        source="#3753",
        shape=(4096, 4096),
        why="l",
    ),
    *_rows(
        {1: 0.415},
        chip="M5, 10",
        source="#3753",
        shape=(14336, 4096),
        why="l",
    ),
    *_rows(
        {14: 0.833, 32: 0.804},
        chip="M5, 10",
        source="#4171",
        shape=(5120, 13824),
        why="m",
    ),
    Row(
        chip="M5 Max, 40",
        source="#4198",
        shape=(6656, 6656),
        m=32,
        value=1.21,
        per=33,
        why="m",
    ),
    *_rows(
        {64: 0.307, 96: 0.418, 128: 0.486, 160: 0.354},
        chip="M5 Max, 40",
        source="#3584",
        shape=(8192, 2048),
        why="o",
    ),
]


def table() -> str:
    """The table of the page, and its notes."""
    head = ["chip, cores", "MLX", "rows x k→n", "group", "published", "model", "error"]
    lines = [f"| {' | '.join([*head, 'note'])} |", "|---" * 8 + "|"]
    lines += [row.cells() for row in ROWS]
    notes = [f"- {letter}: {text}" for letter, text in NOTES.items()]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(table())
