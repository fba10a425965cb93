"""Records which plans are chosen for many problems and devices, and what is predicted.

After an intended change of a plan or of the cost model, record them again:

    python tests/recorded_plans.py
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_marlin.backends import planner
from mlx_marlin.backends.devices import named
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.search import Choice
from mlx_marlin.weights import formats

FILE = Path(__file__).parent / "data" / "recorded_plans.json"
PAIRS_OF_DEVICE = 50
DEVICES = (
    *("Apple M1", "Apple M1 Max", "Apple M2 Ultra", "Apple M3 Max", "Apple M4"),
    *("Apple M4 Pro", "Apple M5", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200"),
    *("NVIDIA GeForce RTX 4090", "NVIDIA L40S"),
)
SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (5120, 17408)),
    *((17408, 5120), (2048, 2048), (151936, 1024), (768, 2048), (136, 512)),
    *((2880, 2880), (8192, 28672)),
)
"""n and k of a problem."""
ROWS = (*range(1, 9), 11, 13, 16, 17, 24, 32, 33, 48, 64, 100, 128, 256, 1000)
FORMATS = (
    *(("affine", bits, 64) for bits in (2, 4, 5, 6, 8)),
    *(("affine", 3, 32), ("affine", 4, 128), ("symmetric", 4, 64)),
    *(("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)),
)
FUSED = Epilogue(bias=True, activation="silu", residual=True)


@dataclass(frozen=True)
class Pair:
    """A problem on a device."""

    device: str  # The device's name
    rows: int  # Rows of x
    shape: tuple[int, int]  # n and k
    format: tuple[str, int, int]  # Mode, bits and group size
    dtype: str  # Of activations
    layout: str  # "mlx" or "marlin"
    batch: int  # How many products there are
    kind: str  # "plain", "fused" or "invariant"

    @property
    def is_valid(self) -> bool:
        """Whether groups fill k, and the format has the layout."""
        mode, bits, group_size = self.format
        layouts = formats.FORMATS[mode, bits].layouts
        return self.shape[1] % group_size == 0 and self.layout in layouts

    @property
    def problem(self) -> Problem:
        mode, bits, group_size = self.format
        return problem_of(
            self.rows,
            *self.shape,
            mode=mode,
            bits=bits,
            group_size=group_size,
            dtype=self.dtype,
            layout=self.layout,
            batch=self.batch,
            epilogue=FUSED if self.kind == "fused" else PLAIN,
            invariant=self.kind == "invariant",
        )

    def __str__(self) -> str:
        n, k = self.shape
        mode, bits, group_size = self.format
        return (
            f"{self.batch}x{self.rows}x{n}x{k} {mode} {bits} {group_size} "
            f"{self.dtype} {self.layout} {self.kind}"
        )


def pair_of(device: str, text: str) -> Pair:
    """Returns the pair that `str` wrote."""
    sizes, mode, bits, group_size, dtype, layout, kind = text.split()
    batch, rows, n, k = map(int, sizes.split("x"))
    format = mode, int(bits), int(group_size)
    return Pair(device, rows, (n, k), format, dtype, layout, batch, kind)


def drawn(device: str) -> list[Pair]:
    """Returns the problems that are recorded for a device."""
    draw = random.Random(device)
    dtypes = ("float16", "bfloat16", "float32")
    if device.startswith("NVIDIA"):
        dtypes = dtypes[:2]
    found: dict[Pair, None] = {}
    while len(found) < PAIRS_OF_DEVICE:
        pair = Pair(
            device=device,
            rows=draw.choice(ROWS),
            shape=draw.choice(SHAPES),
            format=draw.choice(FORMATS),
            dtype=draw.choice(dtypes),
            layout=draw.choice(("mlx", "marlin")),
            batch=draw.choice((1,) * 9 + (4,)),
            kind=draw.choice(("plain",) * 8 + ("fused", "invariant")),
        )
        if pair.is_valid:
            found[pair] = None
    return [*found]


def described(pair: Pair) -> str:
    """Returns what is planned for a pair, and a digest of the candidates too.

    The wording of messages has no part in it.
    """
    choice = planner.compare(pair.problem, device=named(pair.device))
    ours = choice.prediction.seconds
    served = "ours" if choice.reason is None else "stock"
    if planner.choose_dequantize(choice.plan.problem, choice.device) is not None:
        served += ", decoded once"
    return f"{summary(choice.plan)}: {ours * 1e6:.2f} us, {served} #{digest(choice)}"


def summary(plan: Plan) -> str:
    """Returns the fields of a plan as a short text."""
    rows, columns, depth = map(str, (plan.tile.m, plan.tile.n, plan.tile.k))
    grid = "x".join(map(str, plan.simdgroup_grid))
    text = f"{plan.kernel} {rows}x{columns}x{depth} {grid}"
    if plan.buffers:
        text += f" {plan.buffers}+{plan.loaders}"
    work = plan.work
    text += f" {work.strategy} {work.tiles}x{work.k_tiles}/{work.threadgroups}"
    return text + (f" {plan.reduction} {work.slices}" if plan.is_split else "")


def digest(choice: Choice) -> str:
    """Returns a digest of the candidates with their times, and of what else differs."""
    dense = planner.choose_dequantize(choice.plan.problem, choice.device)
    values = [
        [(values_of(each.plan), number(each.seconds)) for each in choice.candidates],
        values_of(choice.plan),
        number(choice.prediction.seconds),
        choice.reason is None,
        dense and (dense.transposed, dense.chunk),
    ]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def number(seconds: float) -> str:
    """Returns a time without its last bits, which a machine's library may decide."""
    return f"{seconds:.9g}"


def values_of(plan: Any) -> Sequence[Any]:
    """Returns a plan's fields in an order of their own, whatever they are called."""
    tile, work = plan.tile, plan.work
    of_metal = (plan.simdgroups_m, plan.operand) if hasattr(plan, "operand") else ()
    return (
        *(plan.kernel, tile.m, tile.n, tile.k),
        *(plan.fragments_m, plan.simdgroups_n, plan.simdgroups_k),
        *(plan.reduction, plan.buffers, plan.loaders, *of_metal),
        *(work.strategy, work.tiles, work.k_tiles, work.threadgroups, work.whole),
        *(work.slices, work.minimum, work.groups, work.partition),
    )


def recorded() -> dict[str, dict[str, str]]:
    """Returns what the file says: of each device, of each problem."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="ascii"))
    return found


def record() -> None:
    """Writes the file again and prints what changed."""
    before = recorded() if FILE.exists() else {}
    after = {
        device: {str(pair): described(pair) for pair in drawn(device)}
        for device in DEVICES
    }
    for device, plans in after.items():
        for problem, plan in plans.items():
            was = before.get(device, {}).get(problem)
            if was != plan:
                print(f"{device}, {problem}:\n  was {was}\n  now {plan}")
    FILE.write_text(json.dumps(after, indent=0) + "\n", encoding="ascii")


if __name__ == "__main__":
    record()
