"""Products of rows with weights chosen from several: the problem and its plan.

These are the products of a mixture of experts. A pair is a row and the expert that it
chose. Which rows chose an expert is known on the GPU only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

GATES = ("silu", "swiglu_oai")
"""`silu(gate) * up`, and the variant of gpt-oss, which clips both before and adds 1 to
up: `swiglu_oai` of `mlx_lm.models.activations` with alpha=1.702 and limit=7."""
MAX_THREADGROUPS = 2**31 // (8 * SIMD_WIDTH)
"""Limit of threadgroups: a grid of 256 threads each is counted in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherProblem:
    """The properties of a call of `gather_qmm` that planning depends on."""

    problem: Problem  # The product of one expert; its m is the number of all pairs
    experts: int  # Number of weights to choose from
    # Number of consecutive pairs that have the same row of x; 0 if an array holds the
    # row of each pair
    pairs_per_row: int = 0
    is_sorted: bool = False  # Whether the experts of the pairs ascend
    # How the product with a first weight gates that with a second one, one of `GATES`;
    # None if an expert has one weight
    gate: str | None = None
    bias: bool = False  # Whether each weight has a bias [experts, n]

    def __post_init__(self) -> None:
        pairs = self.problem.m
        if self.experts < 1:
            raise ValueError(f"experts={self.experts}, expected at least 1")
        if self.pairs_per_row < 0 or (
            self.pairs_per_row and pairs % self.pairs_per_row
        ):
            raise ValueError(
                f"pairs_per_row={self.pairs_per_row} does not divide {pairs} pairs, "
                f"expected 0 or a divisor"
            )
        if self.gate not in (None, *GATES):
            raise ValueError(f"gate={self.gate!r} is not None or one of {GATES}")

    @property
    def is_fused(self) -> bool:
        """Whether the product has an epilogue: a gate, a bias or both."""
        return self.gate is not None or self.bias

    @property
    def weights(self) -> int:
        """Weights of an expert: two with a gate."""
        return 1 if self.gate is None else 2

    @property
    def chosen_experts(self) -> float:
        """Expected number of experts that are chosen, if all are equally likely."""
        return self.experts * (1 - (1 - 1 / self.experts) ** self.problem.m)


AnyProblem = Problem | GatherProblem
"""A product, or products of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan(ABC):
    """How the kernel of a back end computes a `GatherProblem`."""

    backend: ClassVar[str]  # Name of the back end that has its kernel
    gather: GatherProblem  # The problem
    fragments_m: int  # 8-row fragments of x that one simdgroup holds
    simdgroups_k: int  # Simdgroups that share a tile's k

    def __post_init__(self) -> None:
        self.check()
        if not 0 < self.num_threadgroups < MAX_THREADGROUPS:
            raise ValueError(
                f"{self.experts} experts of {self.problem.n} columns and "
                f"{self.problem.m} pairs make {self.num_threadgroups} threadgroups, "
                f"expected 1 to {MAX_THREADGROUPS - 1}"
            )

    @abstractmethod
    def check(self) -> None:
        """Checks the fields, one by one and against each other."""

    @property
    def problem(self) -> Problem:
        """The product of one expert; its m is the number of all pairs."""
        return self.gather.problem

    @property
    def experts(self) -> int:
        """Number of weights to choose from."""
        return self.gather.experts

    @property
    def pairs_per_row(self) -> int:
        """Consecutive pairs for which the kernel reads the same row of x; 0 if it reads
        the rows of pairs from an array."""
        return self.gather.pairs_per_row

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of a tile: pairs that share one reading of the weight."""

    @property
    def columns(self) -> int:
        """Columns of a tile, of gate and up together."""
        return TILE_N

    @property
    @abstractmethod
    def has_ragged_tiles(self) -> bool:
        """Whether the kernel takes an n that is no multiple of a packed tile."""

    @property
    def by_pair(self) -> bool:
        """Whether a threadgroup computes the tile of a pair, not of an expert."""
        return False

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a threadgroup."""

    @property
    @abstractmethod
    def num_threadgroups(self) -> int:
        """Threadgroups of the dispatch."""

    @property
    @abstractmethod
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory that a threadgroup needs."""

    @abstractmethod
    def explain(self) -> str:
        """Returns a line on what will run; every figure is counted, not predicted."""


AnyPlan = Plan | DequantizePlan | GatherPlan
