"""Experts' products on CUDA devices and what they must give, there and on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import graph
from mlx_marlin.backends.cuda.plan import CudaGatherPlan
from mlx_marlin.lm.tracing.experts import scores_of
from mlx_marlin.lm.tracing.model_families import Routing
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles
from support.cuda_cases import Case, Place, as_it_is, k_of
from support.expert_products import gated_by
from support.format_cases import Weight
from support.oracles import Floats, exact

EXPERTS, N, GATED_N = 6, 70, 96
UNEVEN = (3, 0, 3, 3, 5, 0, *([3] * 9), 1)
"""More pairs of an expert than a tile of 8 rows has, of others none or one."""


@dataclass(frozen=True)
class Call:
    """Pairs of a row and an expert, and how they are computed."""

    case: Case  # The format, the layout, the dtype, the rows of x and the block
    chosen: tuple[int, ...]  # The expert of each pair
    each: int = 0  # Pairs that have the same row in turn; 0 if rows are drawn
    # How the first of two weights an expert gates the second, if there are two
    gate: str | None = None
    bias: bool = False  # Whether each weight has a bias

    @property
    def n(self) -> int:
        return GATED_N if self.gate else N

    @cached_property
    def weights(self) -> list[Weight]:
        """All experts' rows below each other: of one weight, or of gate and up."""
        mode, bits, group_size, _, dtype, _, way = self.case
        k = k_of(mode, bits, group_size, way)
        shape = EXPERTS * self.n, k
        return [
            format_cases.any_weight(
                mode, bits, group_size, *shape, dtype=dtype, seed=seed
            )
            for seed in ((1, 2) if self.gate else (1,))
        ]

    @property
    def plan(self) -> CudaGatherPlan:
        mode, bits, group_size, layout, dtype, _, way = self.case
        problem = Problem(
            m=len(self.chosen),
            n=self.n,
            k=k_of(mode, bits, group_size, way),
            mode=mode,
            bits=bits,
            group_size=group_size,
            dtype=dtype,
            scale_dtype=format_of(mode, bits).scale_dtype(dtype),
            layout=layout,
        )
        gather = GatherProblem(
            problem=problem,
            experts=EXPERTS,
            pairs_per_row=self.each,
            gate=self.gate,
            bias=self.bias,
        )
        return CudaGatherPlan(gather=gather, **way)

    @property
    def x(self) -> mx.array:
        _, _, _, _, dtype, m, _ = self.case
        k = self.plan.problem.k
        return format_cases.activations(m, k, dtype=dtype, seed=2)

    @cached_property
    def biases(self) -> list[mx.array]:
        """A bias [experts, n] of each weight, if they have one."""
        draw = np.random.default_rng(3).normal
        dtype = getattr(mx, self.case[4])
        shape = EXPERTS, self.n
        weights = self.weights if self.bias else []
        return [mx.array(draw(size=shape) * 4).astype(dtype) for _ in weights]

    @property
    def sources(self) -> list[int]:
        """The row of x of each pair."""
        pairs = np.arange(len(self.chosen))
        if self.each:
            found: list[int] = (pairs // self.each).tolist()
            return found
        drawn: list[int] = (pairs * 7 % len(self.x)).tolist()
        return drawn

    def run(
        self, place: Place = as_it_is, second: Place | None = None
    ) -> Callable[[], mx.array]:
        """Returns what computes the products [pairs, n], of arrays at a place."""
        first, *others = (self.stored(each) for each in self.weights)
        arrays = [*map(place, first)]
        arrays += [(second or place)(each) for other in others for each in other[:2]]
        experts = mx.array(self.chosen, mx.uint32)
        rows = [] if self.each else [mx.array(self.sources, mx.uint32)]
        given = [place(self.x), *arrays, *map(place, (*self.biases, experts, *rows))]
        product = graph.gather_product(self.plan)
        return lambda: product(*given).squeeze(1)

    def stored(self, weight: Weight) -> tuple[mx.array, mx.array, mx.array]:
        """Returns codes, scales and biases as a kernel takes them."""
        shape = EXPERTS, self.n, -1
        native = tuple(each.reshape(shape) for each in weight.native)
        if self.plan.problem.layout == "mlx":
            return native[0], native[1], native[-1]
        packed = pack(*native, **weight.options)
        return packed.words, packed.scales, packed.scales

    @property
    def expected(self) -> Floats:
        """The products in float64, or what up's is where gate's gates it."""
        rows: Floats = exact(self.x)[self.sources]
        products: list[Floats] = []
        for weight in self.weights:
            chosen = weight.decoded.reshape(EXPERTS, self.n, -1)[[*self.chosen]]
            products.append(np.einsum("pk,pnk->pn", rows, chosen))
        if self.bias:
            added = [exact(each)[[*self.chosen]] for each in self.biases]
            products = [a + b for a, b in zip(products, added, strict=True)]
        return gated_by(self.gate, products)

    def check(self) -> None:
        """Compares the products with float64."""
        error = oracles.error(self.run()(), self.expected)
        assert error < oracles.TOLERANCES[self.case[4]]


def block(across: int, along: int, fragments_m: int = 1) -> dict[str, int]:
    return {
        "simdgroups_n": across,
        "simdgroups_k": along,
        "fragments_m": fragments_m,
    }


AFFINE = ("affine", 4, 64)
CALLS = {
    "blocks of experts": Call((*AFFINE, "marlin", "float16", 5, block(2, 3)), UNEVEN),
    "blocks of pairs": Call(
        (*AFFINE, "marlin", "float16", 2, block(1, 2)), (4, 1, 4, 1), each=2
    ),
    "in MLX's layout": Call(
        (*AFFINE, "mlx", "bfloat16", 16, block(3, 1, 2)), UNEVEN, each=1
    ),
    "small floats": Call(
        ("mxfp4", 4, 32, "marlin", "bfloat16", 3, block(2, 2)), (5, 0, 5), each=1
    ),
    "gate and up": Call(
        (*AFFINE, "marlin", "float16", 4, block(2, 2)), UNEVEN, each=4, gate="silu"
    ),
    "gate and up of pairs": Call(
        (*AFFINE, "marlin", "bfloat16", 2, block(4, 1)),
        (4, 1, 4, 1),
        each=2,
        gate="silu",
    ),
    "biases": Call(
        (*AFFINE, "marlin", "float16", 5, block(2, 2)), UNEVEN, each=0, bias=True
    ),
    "biases of small floats": Call(
        ("mxfp4", 4, 32, "marlin", "bfloat16", 16, block(3, 1, 2)),
        UNEVEN,
        each=1,
        bias=True,
    ),
    "gate and up with biases, both clipped": Call(
        ("mxfp4", 4, 32, "marlin", "bfloat16", 2, block(2, 2)),
        (4, 1, 4, 1),
        each=2,
        gate="swiglu_oai",
        bias=True,
    ),
    "gate and up with biases of rows that are named": Call(
        (*AFFINE, "marlin", "float16", 3, block(4, 1)),
        UNEVEN,
        gate="silu",
        bias=True,
    ),
    "gate and up, both clipped": Call(
        (*AFFINE, "marlin", "float16", 4, block(2, 1)),
        UNEVEN,
        each=4,
        gate="swiglu_oai",
    ),
}


@dataclass(frozen=True)
class Choice:
    """How rows choose experts, and what must come of it."""

    rows: tuple[int, ...]  # Shape of the logits before their last dimension
    experts: int  # To choose from
    each: int  # Choices of a row
    of_all: bool  # Whether scores are the softmax over all experts
    last: bool  # Whether of equal logits the last are chosen
    dtype: str  # Of the logits, and of what is added up
    n: int  # Columns of what is added up

    @property
    def logits(self) -> mx.array:
        """Drawn so that each of a row has an equal one, zeros one of another sign."""
        values = (np.arange(self.experts) // 2 - self.experts // 4) * 0.0701
        values[values == 0] *= [1, -1]
        drawn = np.random.default_rng(1).permuted(
            np.broadcast_to(values, (*self.rows, self.experts)), axis=-1
        )
        return mx.array(drawn).astype(getattr(mx, self.dtype))

    @cached_property
    def expected(self) -> tuple[Floats, Floats]:
        """The experts of rows, the likeliest first, and their scores in float64."""
        logits = exact(self.logits)
        turned = np.flip(logits, axis=-1) if self.last else logits
        chosen = np.argsort(-turned, axis=-1, kind="stable")[..., : self.each]
        chosen = self.experts - 1 - chosen if self.last else chosen
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = np.take_along_axis(shares, chosen, axis=-1)
        over = shares if self.of_all else scores
        return chosen, scores / over.sum(axis=-1, keepdims=True)

    def check(
        self, route: Callable[..., tuple[mx.array, mx.array]], place: Place = as_it_is
    ) -> None:
        """Compares what is chosen with all choices in order."""
        experts, scores = route(place(self.logits), self.each, self.of_all, self.last)
        chosen, expected = self.expected
        assert experts.dtype == mx.uint32
        assert scores.dtype == mx.float32
        assert np.array_equal(experts, chosen)
        assert np.allclose(scores, expected, rtol=1e-5, atol=0)

    def check_sum(
        self, combine: Callable[..., mx.array], place: Place = as_it_is
    ) -> None:
        """Compares a residual plus weighted rows with float64, rounded once."""
        draw = np.random.default_rng(2).normal
        shapes = (*self.rows, self.each, self.n), (*self.rows, self.n)
        dtype = getattr(mx, self.dtype)
        results, residual = (mx.array(draw(size=each)).astype(dtype) for each in shapes)
        scores = mx.array(self.expected[1].astype(np.float32))
        given = results[..., None, :], scores, residual
        total = combine(*map(place, given))
        added = (exact(results) * exact(scores)[..., None]).sum(axis=-2)
        expected = exact(residual) + added
        assert total.dtype == dtype
        assert total.shape == residual.shape
        once = {"float16": 2**-11, "bfloat16": 2**-8}[self.dtype]
        apart = np.abs(exact(total) - expected)
        assert np.all(apart <= 1.001 * once * np.abs(expected) + 1e-6)


SPECIAL = (
    ((1, 0, 3, 2, np.nan, 5), (4, 5, 2), (4, 5, 2)),
    ((1, 0, 3, 2, -np.nan, 5), (5, 2, 3), (5, 2, 3)),
    ((-0.0, 0.0, -0.0, 0.0, -1, -1), (0, 1, 2), (3, 2, 1)),
    ((-np.inf, -np.inf, 1, -np.inf, -np.inf, -np.inf), (2, 0, 1), (2, 5, 4)),
)
"""Logits of rows, and the experts that are chosen if the first of equals comes first,
and if the last does. NaN is the largest number, with its sign the smallest."""


@dataclass(frozen=True)
class SpecialChoice:
    """Rows of logits that are not numbers, infinite, or zeros of either sign."""

    of_all: bool  # As for `Choice`
    last: bool  # As for `Choice`

    def check(self, route: Callable[..., tuple[mx.array, mx.array]]) -> None:
        """Compares what is chosen, and scores: those that NaN enters are NaN."""
        logits = mx.array([row for row, _, _ in SPECIAL], mx.float16)
        experts, scores = route(logits, 3, self.of_all, self.last)
        chosen = np.array([each[1 + self.last] for each in SPECIAL])
        assert np.array_equal(experts, chosen)
        values = exact(logits)
        own = np.take_along_axis(values, chosen, axis=-1)
        over = np.exp(values if self.of_all else own).sum(axis=-1, keepdims=True)
        shares = np.exp(own) / over
        assert np.allclose(scores, shares, rtol=1e-5, atol=0, equal_nan=True)


def choice_of_mlx(
    logits: mx.array, each: int, of_all: bool, last: bool
) -> tuple[mx.array, mx.array]:
    """Does what the kernel does, in MLX's operations, in another order."""
    if last:
        largest = mx.argpartition(logits, kth=-each, axis=-1)[..., -each:]
    else:
        largest = mx.argpartition(-logits, kth=each - 1, axis=-1)[..., :each]
    return largest, scores_of(logits, largest, Routing(each, of_all))


ROUTINGS = (
    Choice((5,), 128, 8, False, True, "float16", 256),
    Choice((2, 3), 60, 5, True, False, "bfloat16", 70),
    Choice((1, 1), 8, 3, False, False, "bfloat16", 128),
    Choice((3,), 7, 7, True, True, "float16", 1),
    Choice((2,), 256, 31, True, True, "float16", 24),
)
SPECIAL_ROUTINGS = tuple(
    SpecialChoice(of_all, last) for of_all in (False, True) for last in (False, True)
)
