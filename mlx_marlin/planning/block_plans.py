"""Plans of kernels that are no products: routing, heads, sums and layouts.

Each has one kernel without alternatives; its fields are what the launch depends on.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar

from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights import layout

MAX_EXPERTS = 1024
"""Limit of the experts of a row: a lane keeps every 32nd logit in a register."""
MAX_COMBINE_THREADS = 128
"""Limit of the threads of a block: a few short rows then fill many multiprocessors."""
NORM_THREADGROUP = 256
"""Threads that add and normalize a row, twice as many if it has more than they take. A
GPU may refuse more of a kernel with many registers, which MLX reports by an error."""
NORM_SIDE = 4
"""Consecutive values of such a thread."""
NORM_TURNS = 8
"""Limit of the times that a thread takes `NORM_SIDE` values, which it keeps in
registers: 72 of 32 bits with bfloat16 (counted), and with 16 times they would spill."""
MOST_NORMED = 2 * NORM_THREADGROUP * NORM_SIDE * NORM_TURNS
"""Limit of the values of a row that is added and normalized."""
REPACK_THREADS = 256
"""Threads of a threadgroup, which moves some tiles of a weight."""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The choice of experts from the logits of rows."""

    backend: ClassVar[str] = ""
    rows: int  # Rows of logits
    dtype: str  # Dtype of the logits
    experts: int  # Logits of a row
    choices: int  # Experts of a row
    of_all: bool  # Whether scores are the softmax over all experts, not over the chosen
    last: bool  # Whether the last of equal logits are chosen, not the first

    @property
    def is_possible(self) -> bool:
        """Whether a simdgroup can choose so many of so many experts."""
        lanes = min(SIMD_WIDTH, self.experts)
        return self.experts <= MAX_EXPERTS and self.choices <= lanes

    @property
    def threads(self) -> int:
        """Threads of the grid: a simdgroup for each row."""
        return self.rows * SIMD_WIDTH

    def explain(self) -> str:
        """Returns a description of the plan."""
        return f"{self.choices} of {self.experts} experts"


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """The sum of a residual and the results of a row's experts times their scores."""

    backend: ClassVar[str] = ""
    rows: int  # Rows of the residual
    dtype: str  # Dtype of the results
    n: int  # Columns of a result
    choices: int  # Results of a row

    @property
    def threads(self) -> int:
        """Threads of the grid: one for each element of the sums."""
        return self.rows * self.n

    @property
    def threadgroup(self) -> int:
        """Threads of a threadgroup; all of them are full."""
        return gcd(self.threads, MAX_COMBINE_THREADS)

    def explain(self) -> str:
        """Returns a description of the plan."""
        return f"{self.choices} results of {self.n} columns"


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """Norms and rotary embeddings of the heads of q and k."""

    backend: ClassVar[str] = ""
    heads: Heads  # The heads
    dtype: str  # Their dtype
    streams: int  # Streams, each with its own tokens
    tokens: int  # New tokens of a stream
    per_stream: bool  # Whether each stream has its own position

    @property
    def threads(self) -> int:
        """Threads of the grid: a simdgroup for each head of each token."""
        heads = self.heads.heads + self.heads.kv_heads
        return self.streams * self.tokens * heads * SIMD_WIDTH

    def explain(self) -> str:
        """Returns a description of the plan."""
        heads = self.heads
        return f"{self.tokens} tokens, {heads.heads} + {heads.kv_heads} heads"


@dataclass(frozen=True, slots=True)
class AddNormPlan:
    """The sum of two rows and its RMSNorm."""

    backend: ClassVar[str] = ""
    rows: int  # Rows that are added
    dtype: str  # Their dtype
    n: int  # Values of a row, at most `MOST_NORMED`
    epsilon: float  # Epsilon of the norm

    @property
    def threadgroup(self) -> int:
        """Threads that add and normalize a row."""
        simdgroups = -(-self.n // (NORM_SIDE * SIMD_WIDTH))
        doubled = self.n > NORM_THREADGROUP * NORM_SIDE * NORM_TURNS
        return min(simdgroups * SIMD_WIDTH, NORM_THREADGROUP * (1 + doubled))

    def explain(self) -> str:
        """Returns a description of the plan."""
        return f"rows of {self.n} values"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPlan:
    """The conversion of codes between MLX's layout and packed tiles."""

    backend: ClassVar[str] = ""
    to: str  # The layout of the result, "mlx" or "marlin"
    batch: tuple[int, ...] = ()  # Leading dimensions of the weights
    n: int  # Rows of a weight
    k: int  # Columns of a weight
    bits: int  # Bits of a code
    group_size: int  # Weights along k that share a scale

    @property
    def order(self) -> str:
        """The order of k in a tile, "k32" or "k64"."""
        return layout.order_of_group(self.group_size)

    @property
    def tiles(self) -> tuple[int, int]:
        """Packed tiles of a weight along n and k."""
        return -(-self.n // layout.TILE_N), -(-self.k // layout.TILE_K)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        if self.to == "marlin":
            return (*self.batch, *self.tiles, layout.tile_words(self.bits))
        return (*self.batch, self.n, self.k * self.bits // 32)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return prod(self.batch)

    def explain(self) -> str:
        """Returns a description of the plan."""
        return f"{self.bits}-bit codes, order {self.order}"
