"""Products of experts on Metal: calls, and what they must return."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import graph
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.products.packing import pack
from support import drawn_arrays, format_cases, oracles
from support.epilogues import STEEPEST
from support.format_cases import Weight
from support.oracles import Floats, exact

LARGEST = {"float16": 65504.0}
OF_FUNCTIONS = 2.0**-20
"""Relative error of activations in float32, and of what is multiplied after them."""


def _sigmoid(x: Floats) -> Floats:
    # Does not overflow.
    result: Floats = (1 + np.tanh(x / 2)) / 2
    return result


def gated_by(gate: str | None, products: list[Floats]) -> Floats:
    """Returns what products with an expert's weights become; without a gate, one."""
    first, up = products[0], products[-1]
    if gate is None:
        return first
    if gate == "silu":
        return first * _sigmoid(first) * up
    first, up = np.minimum(first, 7), np.clip(up, -7, 7)
    return first * _sigmoid(1.702 * first) * (up + 1)


def _off_of_gated(products: list[Floats], offs: list[Floats]) -> Floats:
    """Returns how far gated products may lie from float64 before they are rounded.

    A gate is at most as large as its product; gpt-oss's adds 1 to up.
    """
    (gate, up), (of_gate, of_up) = products, offs
    factor, other = np.abs(gate), np.abs(up) + 1
    sums = STEEPEST * of_gate * (other + of_up) + factor * of_up
    result: Floats = sums + OF_FUNCTIONS * factor * other
    return result


@dataclass(frozen=True, kw_only=True)
class ExpertProducts:
    """A plan, and who chose what."""

    plan: MetalGatherPlan  # What to run
    chosen: tuple[int, ...]  # The expert of each pair
    seed: int = 0  # Of all arrays
    # The operand that has a NaN: "x", "scales" or "biases", and of which weight
    not_a_number: tuple[str, int] | None = None
    offset: int = 0  # Elements before each array's first in its buffer

    @property
    def sources(self) -> list[int]:
        """The row of x of each pair: of some in turn, or of as many rows as pairs."""
        count, each = len(self.chosen), self.plan.pairs_per_row
        return [pair // each if each else 5 * pair % count for pair in range(count)]

    @cached_property
    def weights(self) -> list[Weight]:
        """All experts' rows below each other: of one weight, or of gate and up."""
        problem, gather = self.plan.problem, self.plan.gather
        form = problem.mode, problem.bits, problem.group_size
        shape = gather.experts * problem.n, problem.k
        dtype = problem.dtype
        seeds = range(self.seed, self.seed + gather.weights)
        weights = [
            format_cases.any_weight(*form, *shape, dtype=dtype, seed=seed)
            for seed in seeds
        ]
        for index, weight in enumerate(weights):
            if self.not_a_number == ("scales", index):
                weight.native[1][self.chosen[2] * problem.n + 7, 1] = mx.nan
        return weights

    @cached_property
    def biases(self) -> list[mx.array]:
        """A bias [experts, n] of each weight, if they have one."""
        gather = self.plan.gather
        draw = np.random.default_rng(self.seed).normal
        shape = gather.experts, self.plan.problem.n
        dtype = getattr(mx, self.plan.problem.dtype)
        count = gather.weights * gather.bias
        biases = [mx.array(4 * draw(size=shape)).astype(dtype) for _ in range(count)]
        for index, bias in enumerate(biases):
            if self.not_a_number == ("biases", index):
                bias[self.chosen[2], 7] = mx.nan
        return biases

    def arrays(self) -> tuple[mx.array, ...]:
        """What the kernel takes."""
        problem = self.plan.problem
        rows = problem.m // (self.plan.pairs_per_row or 1)
        x = format_cases.activations(
            rows, problem.k, dtype=problem.dtype, seed=self.seed
        )
        if self.not_a_number == ("x", 0):
            x[self.sources[2], 7] = mx.nan
        first, *others = map(self._stored, self.weights)
        second = [array for stored in others for array in stored[:2]]
        named = () if self.plan.pairs_per_row else (self.sources,)
        pairs = [mx.array(each, mx.uint32) for each in (self.chosen, *named)]
        arrays = (x, *first, *second, *self.biases, *pairs)
        return tuple(drawn_arrays.shifted(each, self.offset) for each in arrays)

    def run(self, *arrays: mx.array) -> mx.array:
        """The results [pairs, n]."""
        y = graph.gather_product(self.plan)(*arrays).squeeze(1)
        mx.eval(y)
        return y

    def wrong_result(self) -> str | None:
        """Compares each element with float64; None if all are within their bounds."""
        x, *others = self.arrays()
        y = self.run(x, *others)
        expected, bound = self._expected(x)
        # Large results of a float16 product may be infinite.
        largest = LARGEST.get(self.plan.problem.dtype, np.inf)
        found, expected = (
            np.clip(each, -largest, largest) for each in (exact(y), expected)
        )
        if found.shape == expected.shape:
            both_nan = np.isnan(found) & np.isnan(expected)
            near = both_nan | (np.abs(found - expected) <= bound)
            if np.all(near) and self._rows_are_near(y, expected):
                return None
        return f"relative error {oracles.error(y, expected):.1e}"

    def _rows_are_near(self, y: mx.array, expected: Floats) -> bool:
        """Returns whether each row of a plain float32 product is, which may be more."""
        is_plain = self.plan.gather.gate is None and not self.biases
        if self.plan.problem.dtype != "float32" or not is_plain:
            return True
        rows = zip(y, expected, strict=True)
        return max(oracles.error(*row) for row in rows) < 2e-6

    def _expected(self, x: mx.array) -> tuple[Floats, Floats]:
        """Returns results in float64, and how far each element may be off.

        The error of a float32 sum is a share of its addends. Scales times codes, biases
        and the offset of codes are at most 16 times the largest weight of a row.
        """
        rows, chosen = exact(x)[self.sources], [*self.chosen]
        shape = self.plan.experts, self.plan.problem.n, -1
        products: list[Floats] = []
        offs: list[Floats] = []
        for weight in self.weights:
            own = weight.decoded.reshape(shape)[chosen]
            products.append(np.einsum("pk,pnk->pn", rows, own))
            sums = np.abs(rows).sum(axis=-1, keepdims=True)
            offs.append(2.0**-18 * sums * np.abs(own).max(axis=-1))
        if self.biases:
            added = (exact(bias)[chosen] for bias in self.biases)
            products = [a + b for a, b in zip(products, added, strict=True)]
        gate, problem = self.plan.gather.gate, self.plan.problem
        expected = gated_by(gate, products)
        off = offs[0] if gate is None else _off_of_gated(products, offs)
        rounding = oracles.ROUNDING[problem.dtype] * np.abs(expected)
        return expected, off + rounding + oracles.SMALLEST[problem.dtype]

    def _stored(self, weight: Weight) -> tuple[mx.array, mx.array, mx.array]:
        """Returns codes, scales and biases as the kernel takes them."""
        shape = self.plan.experts, self.plan.problem.n, -1
        words, scales, *biases = (each.reshape(shape) for each in weight.native)
        if self.plan.problem.layout == "mlx":
            return words, scales, biases[0] if biases else scales
        packed = pack(words, scales, *biases, **weight.options)
        return packed.words, packed.scales, packed.scales
