"""Plans that decode a weight once and compute the product with `mx.matmul`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_K, TILE_N

Block = tuple[int, int, int, int]
"""A block of a weight: (first row, rows, first k, length along k)."""

DECODE_THREADGROUP = 128
"""Threads of a threadgroup of the `dequantize` kernel. Simdgroups are independent of
each other, so any number of them is correct; it was not measured."""
LEAST_ROWS = 65
"""Fewest rows of such a plan; for fewer the kernels decode the weight once anyway."""
MOST_TEMPORARY = 256 * 2**20
"""Bytes of decoded weights that may exist at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizePlan:
    """A product computed as a dense one: the weight is decoded once, then multiplied.

    Used for so many rows that decoding the weight once per tile of rows costs more, and
    for products with a weight that is not transposed, which may be a batch of packed
    weights.
    """

    backend: ClassVar[str] = ""
    problem: Problem  # The product; if not transposed, y[m, k] = x[m, n] @ W[n, k]
    transposed: bool = True  # Whether the weight is transposed
    # Columns of the result computed at a time, a multiple of `side`. It bounds the
    # memory of decoded weights
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
        """Side of a packed tile along a chunk: its rows or its k."""
        return TILE_N if self.transposed else TILE_K

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.problem.n if self.transposed else self.problem.k

    @property
    def rows(self) -> int:
        """Rows that are decoded; the padded weights of a batch are stacked."""
        n, batch = self.problem.n, self.problem.batch
        return n if batch == 1 else batch * self.padded_n

    @property
    def padded_n(self) -> int:
        """Rows of a weight, rounded up to whole tiles."""
        return -(-self.problem.n // TILE_N) * TILE_N

    @property
    def chunks(self) -> tuple[Block, ...]:
        """The block of the weight that each chunk of the result needs."""
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

    def decode_threads(self, block: Block) -> tuple[int, int]:
        """Returns the threads of the grid and of a threadgroup that decode a block.

        A simdgroup decodes one step of k of one packed tile's rows.
        """
        _, rows, _, length = block
        steps = length // step_k(self.problem.group_size)
        threads = SIMD_WIDTH * -(-rows // TILE_N) * steps
        return threads, min(threads, DECODE_THREADGROUP)

    def explain(self) -> str:
        """Returns a one-line description of the plan, without predicted figures."""
        size = self.temporary_bytes / 2**20
        chunks = f" in {len(self.chunks)} chunks" if len(self.chunks) > 1 else ""
        return (
            f"decoded once to {self.problem.dtype} ({size:.1f} MiB{chunks}), mx.matmul"
        )


def dequantize_plan(problem: Problem, *, transposed: bool = True) -> DequantizePlan:
    """Returns the plan of a problem that has the fewest chunks within the limit."""
    side = TILE_N if transposed else TILE_K
    columns = problem.n if transposed else problem.k
    one = DequantizePlan(
        problem=problem, transposed=transposed, chunk=-(-columns // side) * side
    )
    most = MOST_TEMPORARY // (one.temporary_bytes // columns) // side * side
    return replace(one, chunk=min(max(most, side), one.chunk))
