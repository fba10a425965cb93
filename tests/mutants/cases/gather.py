"""Products with chosen weights on which a planted bug must show."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import metal_emulator
from mlx_marlin.backends import launcher
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.planning.explicit import Operand
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from support import drawn_arrays, format_cases, oracles
from support.format_cases import Weight

LIMIT = 2e-6
"""Most relative error of a row: twice that of a whole result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCase:
    """A plan, and who chose what.

    Attributes:
        plan: What to run.
        chosen: The expert of each pair.
        offset: Elements before each array's first in its buffer.
    """

    plan: MetalGatherPlan
    chosen: tuple[int, ...]
    offset: int = 0

    @property
    def sources(self) -> list[int]:
        """The row of x of each pair, of which there are as many as pairs."""
        count = len(self.chosen)
        return [5 * pair % count for pair in range(count)]

    def x(self) -> mx.array:
        """The activations [pairs, k]."""
        problem = self.plan.problem
        return format_cases.activations(problem.m, problem.k, dtype="float32", seed=7)

    def weight(self) -> Weight:
        """All experts' rows below each other, in MLX's layout."""
        problem, experts = self.plan.problem, self.plan.experts
        form = problem.mode, problem.bits, problem.group_size
        return format_cases.any_weight(
            *form, experts * problem.n, problem.k, dtype="float32", seed=9
        )

    def arrays(self) -> tuple[mx.array, ...]:
        """What the kernel takes."""
        weight, problem = self.weight(), self.plan.problem
        native = (
            each.reshape(self.plan.experts, problem.n, -1) for each in weight.native
        )
        if problem.layout == "marlin":
            packed = pack(*native, **weight.options)
            stored = packed.words, packed.scales, packed.scales
        else:
            words, scales, *biases = native
            stored = words, scales, biases[0] if biases else scales
        pairs = mx.array(self.chosen, mx.uint32), mx.array(self.sources, mx.uint32)
        arrays = (self.x(), *stored, *pairs)
        return tuple(drawn_arrays.shifted(each, self.offset) for each in arrays)

    def run(self, *arrays: mx.array) -> mx.array:
        """The products [pairs, n]."""
        y = launcher.gather_product(self.plan)(*arrays).squeeze(1)
        mx.eval(y)
        return y

    def wrong_result(self) -> str | None:
        """The float64 oracle, each pair by itself."""
        y = self.run(*self.arrays())
        decoded = self.weight().decoded
        experts = decoded.reshape(self.plan.experts, -1, self.plan.problem.k)
        rows = oracles.exact(self.x())[self.sources]
        expected = np.einsum("pk,pnk->pn", rows, experts[list(self.chosen)])
        errors = [oracles.error(*each) for each in zip(y, expected, strict=True)]
        # Not a number is not below anything.
        wrong = [i for i, error in enumerate(errors) if not error < LIMIT]
        return f"pairs {wrong}" if wrong else None

    def miscounted(self) -> str | None:
        """Words of a chosen expert once for every tile of rows, and its matrices."""
        plan, problem = self.plan, self.plan.problem
        found = metal_emulator.trace(self.run, *self.arrays())[0]
        readers = matrices = 0
        for rows in self._tiles():
            few = rows <= plan.dot_rows
            simdgroups = -(-rows // (8 * plan.fragments_m))
            readers += 1 if few else simdgroups
            matrices += 0 if few else simdgroups * plan.fragments_m
        counted = found.of("w").read_bytes, found.count("matrix")
        expected = (
            readers * problem.code_bytes,
            matrices * (problem.n // 8) * (problem.k // 8),
        )
        if counted == expected:
            return None
        return f"{counted} bytes and matrix products, expected {expected}"

    def _tiles(self) -> list[int]:
        """The rows of every tile."""
        most = self.plan.rows
        counts = [self.chosen.count(each) for each in {*self.chosen}]
        return [
            min(most, count - first)
            for count in counts
            for first in range(0, count, most)
        ]


# 37 pairs of expert 1, 8 of expert 2, none of expert 0: the last of them comes after
# 32 others, and the last pair is not in a whole run of 32.
_CHOSEN = tuple(2 if pair % 6 == 3 else 1 for pair in range(45))

# One pair of expert 0, two of expert 1, 18 of expert 2: a whole tile and two more.
_FEW = (2, 1, 2, 0, 1, *(2,) * 16)


def _plan(
    problem: Problem,
    *,
    fragments_m: int,
    simdgroups_m: int,
    simdgroups_k: int,
    dot_rows: int = 0,
    operand: Operand = "exact",
) -> MetalGatherPlan:
    return MetalGatherPlan(
        gather=GatherProblem(problem=problem, experts=3),
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        dot_rows=dot_rows,
        operand=operand,
    )


def _problem(
    n: int, k: int, group_size: int, bits: int, layout: str, pairs: int = len(_CHOSEN)
) -> Problem:
    return Problem(
        m=pairs,
        n=n,
        k=k,
        group_size=group_size,
        bits=bits,
        dtype="float32",
        scale_dtype="float32",
        layout=layout,
    )


GATHER_CASES = {
    "experts, native codes of 4 bits, odd offsets": GatherCase(
        plan=_plan(
            _problem(41, 192, 64, 4, "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
        offset=3,
    ),
    "experts, packed codes of 3 bits, groups of 32, k tail": GatherCase(
        plan=_plan(
            _problem(41, 160, 32, 3, "marlin"),
            fragments_m=1,
            simdgroups_m=2,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
    ),
    "experts, packed codes of 4 bits, whole tiles": GatherCase(
        plan=_plan(
            _problem(64, 128, 64, 4, "marlin"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
    ),
    "experts of one row and of two, native codes of 4 bits, odd offsets": GatherCase(
        plan=_plan(
            _problem(41, 320, 64, 4, "mlx", len(_FEW)),
            fragments_m=1,
            simdgroups_m=2,
            simdgroups_k=2,
            dot_rows=2,
        ),
        chosen=_FEW,
        offset=3,
    ),
    "experts of one row and of two, packed codes, whole tiles": GatherCase(
        plan=_plan(
            _problem(64, 256, 64, 4, "marlin", len(_FEW)),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=4,
            dot_rows=2,
        ),
        chosen=_FEW,
    ),
}
