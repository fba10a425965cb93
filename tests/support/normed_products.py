"""Products of normalized rows: calls, and what they must return."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import graph
from mlx_marlin.planning.plan import Plan
from support import drawn_arrays, epilogues, format_cases, oracles
from support.cuda_cases import norm_of, normalized
from support.format_cases import Weight
from support.oracles import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Normed:
    """A plan with a norm, and seeds of its arrays."""

    plan: Plan  # What to run
    seed: int = 0  # Of activations and weight

    def arrays(self) -> tuple[mx.array, ...]:
        """Activations, the norm's weight, and the weight as the kernel takes it."""
        problem = self.plan.problem
        x = format_cases.activations(
            problem.m, problem.k, dtype=problem.dtype, seed=self.seed
        )
        stored = format_cases.arguments(self._weight(), problem.layout)
        return (3 * x, norm_of(x), *stored)

    def run(self, x: mx.array, norm: mx.array, *stored: mx.array) -> mx.array:
        """The result; those of parts are side by side."""
        finish = drawn_arrays.finish_arrays(self.plan.problem, seed=self.seed)
        y = epilogues.whole(graph.product(self.plan)(x, *stored, *finish, norm))
        mx.eval(y)
        return y

    def wrong_result(self) -> str | None:
        """Compares each element with float64; None if all are within their bounds."""
        x, norm, *stored = self.arrays()
        y = self.run(x, norm, *stored)
        expected, off = self._expected(x, norm)
        if epilogues.are_within(y, expected, off):
            return None
        return f"relative error {oracles.error(y, expected):.1e}"

    def _weight(self) -> Weight:
        return drawn_arrays.weight_of(self.plan.problem, seed=self.seed + 1)

    def _expected(self, x: mx.array, norm: mx.array) -> tuple[Floats, Floats]:
        """Returns results in float64, and how far off each is before its rounding."""
        problem = self.plan.problem
        epilogue, weight = problem.epilogue, self._weight().decoded
        assert problem.norm is not None
        rows = normalized(x, norm, problem.norm)
        total = rows @ weight.T
        sums = epilogues.off_of_sums(rows, weight)
        finish = drawn_arrays.finish_arrays(problem, seed=self.seed)
        expected = epilogues.finished(total, finish, epilogue)
        if epilogue.gated:
            off = epilogues.off_of_gated(total, sums, epilogue.activation)
        else:
            off = sums + 2.0**-22 * np.abs(expected)
        return expected, off
