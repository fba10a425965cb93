"""Products with chosen weights on which a planted bug must show."""

from dataclasses import dataclass

import format_cases
import mlx.core as mx
import numpy as np
import oracles
import strategies
from format_cases import Weight

from mlx_marlin import emulator, launch
from mlx_marlin.gather_plan import GatherPlan
from mlx_marlin.packing import pack
from mlx_marlin.problem import Problem

GATHER_NATIVE = "experts, native codes of 4 bits, odd offsets"
GATHER_PACKED = "experts, packed codes of 3 bits, groups of 32, k tail"
GATHER_COUNTED = "experts, packed codes of 4 bits, whole tiles"
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

    plan: GatherPlan
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
        pairs = mx.array(self.sources, mx.uint32), mx.array(self.chosen, mx.uint32)
        arrays = (self.x(), *stored, *pairs)
        return tuple(strategies.shifted(each, self.offset) for each in arrays)

    def run(self, *arrays: mx.array) -> mx.array:
        """The products [pairs, n]."""
        y = launch.gather_product(self.plan)(*arrays)
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
        """The words of a chosen expert once for every tile of rows."""
        problem, tile = self.plan.problem, self.plan.rows
        found = emulator.trace(self.run, *self.arrays())[0]
        passes = sum(-(-self.chosen.count(each) // tile) for each in {*self.chosen})
        readers = passes * self.plan.simdgroups_m
        read = found.of("w").read_bytes
        expected = readers * problem.code_bytes
        return None if read == expected else f"{read} bytes, expected {expected}"


# 37 pairs of expert 1, 8 of expert 2, none of expert 0: the last of them comes after
# 32 others, and the last pair is not in a whole run of 32.
_CHOSEN = tuple(2 if pair % 6 == 3 else 1 for pair in range(45))


def _plan(
    problem: Problem,
    *,
    fragments_m: int,
    simdgroups_m: int,
    simdgroups_k: int,
    subtract: bool = True,
) -> GatherPlan:
    return GatherPlan(
        problem=problem,
        experts=3,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        subtract=subtract,
    )


def _problem(n: int, k: int, group_size: int, bits: int, layout: str) -> Problem:
    return Problem(
        m=len(_CHOSEN),
        n=n,
        k=k,
        group_size=group_size,
        bits=bits,
        dtype="float32",
        scale_dtype="float32",
        layout=layout,
    )


GATHER_CASES = {
    GATHER_NATIVE: GatherCase(
        plan=_plan(
            _problem(41, 192, 64, 4, "mlx"),
            fragments_m=2,
            simdgroups_m=1,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
        offset=3,
    ),
    GATHER_PACKED: GatherCase(
        plan=_plan(
            _problem(41, 160, 32, 3, "marlin"),
            fragments_m=1,
            simdgroups_m=2,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
    ),
    GATHER_COUNTED: GatherCase(
        plan=_plan(
            _problem(64, 128, 64, 4, "marlin"),
            fragments_m=1,
            simdgroups_m=1,
            simdgroups_k=2,
        ),
        chosen=_CHOSEN,
    ),
}
