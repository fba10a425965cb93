"""The bytes of a product: its operands counted once, and what a plan requests."""

from dataclasses import dataclass

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT
from mlx_marlin.weights.formats import TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandBytes:
    """Bytes of the operands of a product, each counted once."""

    codes: int  # The codes of the weight
    scales: int  # The scales of its groups
    offsets: int  # The biases or zero points of its groups; 0 in formats without them
    activations: int  # The rows of x
    result: int  # The result
    epilogue: int = 0  # Other arrays of the epilogue

    @staticmethod
    def of(problem: Problem) -> "OperandBytes":
        """Returns the bytes of a problem's operands."""
        scales = problem.scale_bytes // problem.format.parameters
        return OperandBytes(
            codes=problem.code_bytes,
            scales=scales,
            offsets=problem.scale_bytes - scales,
            activations=problem.activation_bytes,
            result=problem.output_bytes,
            epilogue=problem.epilogue.operands * problem.output_bytes,
        )

    @property
    def total(self) -> int:
        """Bytes of all operands."""
        weight = self.codes + self.scales + self.offsets
        return weight + self.activations + self.result + self.epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the simdgroups of a plan request of device memory.

    Caches serve most of what is requested again, so this is no memory traffic.
    """

    weight_reads: int  # How often each weight is requested
    activation_reads: int  # How often each activation is requested
    workspace: int  # Bytes of partial sums that are written and read back
    total: int  # Bytes of all requests

    @staticmethod
    def of(plan: Plan) -> "Traffic":
        """Returns the requests of a plan, as its tiles imply them.

        Without stages, simdgroups read for themselves: each column of packed tiles
        reads x, and each group of row fragments reads the weight. With stages, a
        threadgroup reads what its tile needs once.
        """
        problem = plan.problem
        rows = FRAGMENT * plan.fragments_m or plan.tile.m
        weight_reads = plan.m_tiles if plan.buffers else -(-problem.m // rows)
        columns = plan.n_tiles if plan.buffers else -(-problem.n // TILE_N)
        once = problem.bytes - problem.weight_bytes - problem.activation_bytes
        return Traffic(
            weight_reads=weight_reads,
            activation_reads=columns,
            workspace=plan.workspace_traffic,
            total=once
            + weight_reads * problem.weight_bytes
            + columns * problem.activation_bytes
            + plan.workspace_traffic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the emulator counted when it ran a plan; the same on every machine."""

    launches: int  # Kernels that were launched
    # Bytes that simdgroups requested of device memory, except those that a compiler
    # would keep in registers
    read_bytes: int
    written_bytes: int  # Bytes that they wrote, likewise
    matrix_products: int  # 8x8 matrix products
    barriers: int  # Barriers of threadgroups
