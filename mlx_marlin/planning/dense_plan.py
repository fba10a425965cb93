"""How a weight is decoded once, for a product that MLX then computes by itself."""

from dataclasses import dataclass

from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_K, TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    """A product as a plain one: the weight decoded once, then MLX's own product.

    For so many rows that decoding the weight for each tile of them is more work, and
    for the product with a weight that is not transposed: also with each of a batch, if
    they are packed.

    Attributes:
        problem: The product; if not transposed, y[m, k] = x[m, n] @ W[n, k].
        transposed: Whether the weight is.
        chunk: Columns of the result that are computed at a time, a multiple of a tile's
            side: what bounds the memory that decoded weights take.
    """

    problem: Problem
    transposed: bool = True
    chunk: int

    def __post_init__(self) -> None:
        if self.problem.batch > 1 and (self.transposed or self.problem.layout == "mlx"):
            raise ValueError(
                f"batch={self.problem.batch}, expected one weight, or packed ones that "
                f"are not transposed"
            )
        side = self.side
        if self.chunk < side or self.chunk % side:
            raise ValueError(f"chunk={self.chunk} is not a positive multiple of {side}")

    @property
    def side(self) -> int:
        """What chunks are multiples of: rows or k of a tile."""
        return TILE_N if self.transposed else TILE_K

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.problem.n if self.transposed else self.problem.k

    @property
    def rows(self) -> int:
        """Rows that are decoded: weights of a batch lie below each other, padded."""
        n, batch = self.problem.n, self.problem.batch
        return n if batch == 1 else batch * self.padded_n

    @property
    def padded_n(self) -> int:
        """Rows of a weight with those that fill its last tile."""
        return -(-self.problem.n // TILE_N) * TILE_N

    @property
    def chunks(self) -> tuple[tuple[int, int, int, int], ...]:
        """The block of the weight of each chunk: (first row, rows, first k, length)."""
        n, k = self.rows, self.problem.k
        starts = range(0, self.columns, self.chunk)
        if self.transposed:
            return tuple((i, min(self.chunk, n - i), 0, k) for i in starts)
        return tuple((0, n, i, min(self.chunk, k - i)) for i in starts)

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the decoded weights of one chunk."""
        _, rows, _, length = self.chunks[0]
        return rows * length * DTYPE_BYTES[self.problem.dtype]

    def explain(self) -> str:
        """Says in a line what will run; every figure is counted, none predicted."""
        size = self.temporary_bytes / 2**20
        each = f" in {len(self.chunks)} chunks" if len(self.chunks) > 1 else ""
        return f"decoded once to {self.problem.dtype} ({size:.1f} MiB{each}), mx.matmul"


MOST_TEMPORARY = 256 * 2**20
"""Bytes that decoded weights may take at a time."""


def dense_plan(problem: Problem, *, transposed: bool = True) -> DensePlan:
    """Returns the plain product of a problem, in as few chunks as the memory allows."""
    side = TILE_N if transposed else TILE_K
    columns, length = problem.n, problem.k
    if not transposed:
        columns, length = length, problem.batch * columns
    most = MOST_TEMPORARY // (length * DTYPE_BYTES[problem.dtype]) // side * side
    whole = -(-columns // side) * side
    return DensePlan(
        problem=problem, transposed=transposed, chunk=min(max(most, side), whole)
    )
