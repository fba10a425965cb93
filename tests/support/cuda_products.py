"""Products of drawn arrays by CUDA kernels, and what they must give in float64."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import graph
from mlx_marlin.backends.source import EPILOGUE_OPERANDS, HEAD_NORMS, OPERANDS
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from support import cuda_cases, epilogues, oracles
from support.cuda_cases import (
    Case,
    N,
    Place,
    as_it_is,
    freqs_of,
    norm_of,
    norms_of,
    positions_of,
)
from support.format_cases import GLOBAL_SCALE, Weight, arguments
from support.oracles import Floats, exact


@dataclass(frozen=True)
class Product:
    """A case, what is done to its rows before, and what follows the product."""

    case: Case  # The format, the layout, the dtype, the rows of x and the block
    epilogue: Epilogue = PLAIN  # What follows
    n: int = N  # Columns of the weight
    # Epsilon of the norm of rows before, if they are normalized
    norm: float | None = None
    batch: int = 1  # Weights, each with an x of its own
    global_scale: bool = False  # Whether the weight has one
    first: int = -2  # Position of the first row, where heads are rotated

    def __str__(self) -> str:
        rest = f", {self.epilogue.explain()}" if self.epilogue != PLAIN else ""
        norm = "" if self.norm is None else ", rows normalized"
        scale = ", a global scale" * self.global_scale
        return f"{self.case}, {self.batch} x {self.n}{rest}{norm}{scale}"

    @property
    def options(self) -> dict[str, Any]:
        """What a plan of the case has to have besides."""
        names = ("epilogue", "n", "norm", "batch", "global_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def plan(self) -> Plan:
        return cuda_cases.plan_of(self.case, **self.options)

    @cached_property
    def drawn(self) -> list[tuple[Weight, mx.array]]:
        """A weight and activations [m, k] of each product of the batch."""
        scale = mx.array(GLOBAL_SCALE) if self.global_scale else None
        drawn = (
            cuda_cases.draw(self.case, seed, self.n)
            for seed in range(1, self.batch + 1)
        )
        return [(replace(weight, global_scale=scale), x) for weight, x in drawn]

    @cached_property
    def arrays(self) -> dict[str, mx.array]:
        """What a call takes, by name and in its order."""
        each = [(x, *arguments(weight, self.case[3])) for weight, x in self.drawn]
        stored = [*zip(*each, strict=True)]
        own = [mx.stack(a) if self.batch > 1 else a[0] for a in stored]
        m, dtype, rotation = self.case[5], own[0].dtype, self.epilogue.rotation
        finish = cuda_cases.operands(m, self.n, dtype)
        found = dict(zip(OPERANDS, own, strict=True))
        found |= zip(EPILOGUE_OPERANDS, finish, strict=True)
        if rotation is not None:
            found["positions"] = positions_of(m, rotation, self.first)
            found["freqs"] = freqs_of(rotation)
            found |= zip(HEAD_NORMS, norms_of(rotation, dtype), strict=False)
        return found | {"norm": norm_of(own[0])}

    def run(
        self,
        plan: Plan,
        place: Place = as_it_is,
        names: Collection[str] | None = None,
    ) -> Callable[[], mx.array]:
        """Returns what computes it; without `names` all arrays are at `place`.

        The arrays of parts are side by side.
        """
        given = [
            place(array) if names is None or name in names else array
            for name, array in self.arrays.items()
        ]
        product = graph.product(plan)

        def call() -> mx.array:
            y = product(*given)
            return mx.concatenate([*y], axis=1) if self.epilogue.parts else y

        return call

    @cached_property
    def expected(self) -> Floats:
        """The results in float64."""
        totals = [self._rows(x) @ weight.decoded.T for weight, x in self.drawn]
        if self.batch > 1:
            return np.stack(totals)
        bias, multiplier, residual = (self.arrays[name] for name in EPILOGUE_OPERANDS)
        finish = bias, multiplier, residual
        total = epilogues.finished(totals[0], finish, self.epilogue)
        rotation = self.epilogue.rotation
        if rotation is None:
            return total
        names = ("positions", "freqs", *HEAD_NORMS)
        given = [self.arrays[name] for name in names if name in self.arrays]
        return epilogues.rotated(total, rotation, *given)

    def _rows(self, x: mx.array) -> Floats:
        if self.norm is None:
            return exact(x)
        return cuda_cases.normalized(x, self.arrays["norm"], self.norm)

    def error(self, y: mx.array) -> float:
        """Returns the relative error of a result, or the largest of a batch."""
        if self.batch == 1:
            return oracles.error(y, self.expected)
        return max(map(oracles.error, [*y], self.expected))

    def assert_right(self, y: mx.array) -> None:
        """Compares with float64, and a plain product with MLX's in the same dtype."""
        dtype = self.case[4]
        assert y.shape == self.expected.shape
        assert self.error(y) < oracles.TOLERANCES[dtype]
        if self.epilogue == PLAIN and self.norm is None:
            each = [*y] if self.batch > 1 else [y]
            for own, (weight, x) in zip(each, self.drawn, strict=True):
                cuda_cases.assert_right(own, x, weight.decoded, dtype)
