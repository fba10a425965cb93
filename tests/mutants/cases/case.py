"""A plan on which a planted bug must show, and the arrays that it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_marlin.backends import graph
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.plan import Plan
from support import drawn_arrays, epilogues, format_cases
from support.format_cases import Weight


class Judge(Protocol):
    """A case that knows what is right."""

    def wrong_result(self) -> str | None:
        """Returns what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and where its arrays begin in their buffers."""

    plan: Plan | DequantizePlan  # What to run
    offset: int = 0  # Elements before each array's first in its buffer

    @property
    def planned(self) -> Plan:
        """The plan of a case that runs one of the kernels for products."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def arrays(self) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Activations, and the weight in MLX's layout."""
        problem = self.plan.problem
        if (problem.mode, problem.bits) == ("affine", 4):
            return drawn_arrays.arrays(problem, seed=7)
        back = isinstance(self.plan, DequantizePlan) and not self.plan.transposed
        inner = problem.n if back else problem.k
        x = format_cases.activations(problem.m, inner, dtype=problem.dtype, seed=7)
        return x, drawn_arrays.weight_of(problem, seed=9).native

    def weight(self, native: tuple[mx.array, ...]) -> Weight:
        """The arrays of a weight with the case's format."""
        problem = self.plan.problem
        scale = drawn_arrays.weight_of(problem, seed=9).global_scale
        return Weight(problem.mode, problem.bits, problem.group_size, native, scale)

    def finish(self) -> drawn_arrays.Native:
        """Bias, multiplier and residual."""
        return drawn_arrays.finish_arrays(self.plan.problem, seed=8)

    def run(self, x: mx.array, native: tuple[mx.array, ...]) -> mx.array:
        """The product as the shaders compute it, [m, n], or a batch of them."""
        problem = self.plan.problem
        finish = () if problem.epilogue == PLAIN else self.finish()
        if problem.batch > 1:
            stored = drawn_arrays.stored(problem, native)
        else:
            stored = format_cases.arguments(self.weight(native), problem.layout)
        arrays = (x, *stored, *finish)
        shifted = (drawn_arrays.shifted(each, self.offset) for each in arrays)
        y = epilogues.whole(self._product()(*shifted))
        mx.eval(y)
        return y

    def _product(self) -> graph.Product:
        if isinstance(self.plan, DequantizePlan):
            return graph.dequantized_product(self.plan)
        return graph.product(self.plan)


def cases_of(plans: Mapping[str, Plan | DequantizePlan | Case]) -> dict[str, Case]:
    """Returns the cases of plans, whose arrays begin where their buffers do."""
    return {
        name: each if isinstance(each, Case) else Case(plan=each)
        for name, each in plans.items()
    }
