"""Plans of experts' products on Apple GPUs.

A threadgroup computes one column of tiles of one expert. It finds the rows that chose
the expert, so that the weight is read once for all of them. Which rows these are is
known on the GPU only: there are threadgroups for every expert, and those of an expert
that no row chose end immediately.

Few rows of a tile are computed as dot products, as in `gemv`: the weight of an expert
that one row chose needs no 8x8 matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma, log, sqrt
from typing import ClassVar

from mlx_marlin.backends.metal.cost import STORE_SLOTS, WHOLE_SLOTS
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    MAX_DOT_ROWS,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
    THREADGROUP_LIMIT,
    dots_of,
    expert_registers,
    operand_of,
    operand_reason,
)
from mlx_marlin.backends.metal.main_loop import (
    WEIGHTS_PER_TRIP,
    loop_slots,
    memory_seconds,
    slots_per_second,
)
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, PADDED_COLUMNS, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalGatherPlan(GatherPlan):
    """How the Metal kernel computes experts' products."""

    backend: ClassVar[str] = "metal"

    simdgroups_m: int  # Simdgroups side by side along the rows
    # A tile of up to this many rows is computed as dot products, for which all
    # simdgroups share k
    dot_rows: int
    # The form of codes that lanes multiply with matrices. With a gate, `simdgroups_k`
    # counts those of both weights of an expert
    operand: CodeForm

    def check(self) -> None:
        """Checks the fields, one by one and against each other."""
        if self.simdgroups_k % self.gather.weights:
            raise ValueError(
                f"simdgroups_k={self.simdgroups_k} is odd, expected an even number: a "
                f"gate halves them"
            )
        if self.fragments_m not in FRAGMENTS_M:
            raise ValueError(
                f"fragments_m={self.fragments_m} is not one of {FRAGMENTS_M}"
            )
        if not 1 <= self.simdgroups_m * self.simdgroups_k <= MAX_SIMDGROUPS:
            raise ValueError(
                f"simdgroups_m={self.simdgroups_m} x simdgroups_k={self.simdgroups_k} "
                f"is not between 1 and {MAX_SIMDGROUPS} simdgroups"
            )
        if not 0 <= self.dot_rows <= MAX_DOT_ROWS:
            raise ValueError(
                f"dot_rows={self.dot_rows} is not between 0 and {MAX_DOT_ROWS}"
            )
        if self.problem.invariant and (self.dot_rows or self.operand != "exact"):
            raise ValueError(
                "invariant=True needs operand='exact' and dot_rows=0: otherwise the "
                "bits of a row depend on the number of rows"
            )
        reason = operand_reason(self.problem, self.operand, "gemm_register")
        if reason is not None:
            raise ValueError(f"operand={self.operand!r} {reason}")
        if self.threadgroup_bytes > THREADGROUP_LIMIT:
            raise ValueError(
                f"{self.threadgroup_bytes} bytes of threadgroup memory are more than "
                f"{THREADGROUP_LIMIT}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile: pairs that share one reading of the weight."""
        return FRAGMENT * self.fragments_m * self.simdgroups_m

    @property
    def has_ragged_tiles(self) -> bool:
        """Whether the kernel is compiled for an n that does not fill the last tile."""
        return self.problem.n % TILE_N != 0

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.simdgroups_m * self.simdgroups_k

    @property
    def num_threadgroups(self) -> int:
        """Threadgroups: one for each column of tiles of each expert."""
        return self.experts * -(-self.problem.n // TILE_N)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: the scratch and the list of pairs."""
        scratch = self.simdgroups_k * self.rows * PADDED_COLUMNS * 4
        return scratch + self.rows * 4

    @property
    def registers(self) -> int:
        """32-bit registers of a thread (counted)."""
        fields = self.fragments_m, self.dot_rows, self.operand
        return expert_registers(self.gather, *fields)

    def explain(self) -> str:
        """Returns a line on what will run; every figure is counted, not predicted."""
        gated = f", gated by {self.gather.gate}" if self.gather.gate else ""
        return (
            f"gather {self.rows}x{TILE_N}{gated}, "
            f"{self.simdgroups_m}x{self.simdgroups_k} simdgroups (m x k), "
            f"dot products up to {self.dot_rows} rows, "
            f"{self.problem.m} pairs over {self.experts} experts, "
            f"{self.num_threadgroups} threadgroups"
        )


SIMDGROUPS_K = 4
"""Simdgroups along k, unless that exceeds the limit of a threadgroup."""
EXPERT_SLOTS = {"marlin": 30, "mlx": 62}
"""Issue slots of an iteration of the main loop for the 64-bit addresses of an expert,
by layout (counted for 4 bits)."""
SCAN_SLOTS = 55
"""Issue slots in which a simdgroup scans 32 pairs (counted)."""
DEVIATIONS = 9
"""An expert's number of rows is summed over this many standard deviations around its
mean."""


@lru_cache(maxsize=4096)
def choose_gather(
    gather: GatherProblem, device: Device, operand: CodeForm | None = None
) -> MetalGatherPlan:
    """Returns the plan for experts' products; cached.

    It is the first whose registers a thread has: with fewer fragments, then with fewer
    rows of dot products.
    """
    problem = gather.problem
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (gather.experts * FRAGMENT))
    most = 1 if fragments <= 1 else _max_fragments(problem, device)
    # The bits of a row must not depend on how many rows chose its expert.
    dot_rows = 0 if problem.invariant else MAX_DOT_ROWS
    shapes = [(count, dot_rows) for count in range(most, 0, -1)]
    shapes += [(1, rows) for rows in range(dot_rows)[::-1]]
    plans = [
        _plan(
            gather,
            fragments,
            *shape,
            operand or operand_of(problem, device, *shape[:1]),
        )
        for shape in shapes
    ]
    most_registers = device.core.thread_registers
    return next((plan for plan in plans if plan.registers <= most_registers), plans[-1])


def _plan(
    gather: GatherProblem,
    fragments: int,
    fragments_m: int,
    dot_rows: int,
    operand: CodeForm,
) -> MetalGatherPlan:
    """Returns a plan for experts' products."""
    problem = gather.problem
    simdgroups_m = min(-(-fragments // fragments_m), MAX_SIMDGROUPS_M)
    # The bits of a row are the same for any number of rows only if k is cut alike.
    # Twice as many for a gate, unless that leaves memory for one threadgroup on a core.
    most = SIMDGROUPS_K * (gather.weights if fragments <= 1 else 1)
    simdgroups_beside = MAX_SIMDGROUPS_M if problem.invariant else simdgroups_m
    return MetalGatherPlan(
        gather=gather,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=min(most, MAX_SIMDGROUPS // simdgroups_beside),
        dot_rows=dot_rows,
        operand=operand,
    )


def _max_fragments(problem: Problem, device: Device) -> int:
    """Returns the limit of the fragments of x of a simdgroup.

    The kernel for native codes has 11642 bytes of code with two fragments (counted).
    The instruction cache of the M1 holds 12 KB, and code that exceeds it runs slowly.
    Invariant plans have no dot products, and about half of that code.
    """
    if problem.layout == "mlx" and not problem.invariant and device.generation == "M1":
        return 1
    return max(FRAGMENTS_M)


def gather_unsupported(gather: GatherProblem) -> str | None:
    """Returns why the kernel cannot compute experts' products, or None."""
    if gather.gate is None:
        return None
    if gather.problem.layout != "marlin" or gather.problem.invariant:
        return (
            "our Metal kernel for experts gates packed weights, of products that are "
            "not invariant"
        )
    return None


def gather_seconds(gather: GatherProblem, device: Device) -> float:
    """Returns the predicted seconds of our kernels.

    The model assumes that every pair chooses an expert independently and that all
    experts are equally likely; from that follows how many rows share a reading of a
    weight (`expected_tiles`). Tiles of few rows are priced as dot products. There are
    assumed to be enough threadgroups to load all cores equally.
    """
    return max(own_times(gather, device))


def expected_tiles(pairs: int, experts: int, max_rows: int) -> dict[int, float]:
    """Returns the expected number of tiles by their number of rows.

    Every pair chooses an expert independently, and all experts are equally likely, so
    the number of rows of an expert is binomial. The rows fill whole tiles, and the
    remainder is one more tile.
    """
    tiles: dict[int, float] = {}
    for expert_rows, share in _rows_of_expert(pairs, experts):
        whole, rest = divmod(expert_rows, max_rows)
        for rows, count in ((max_rows, whole), (rest, 1)):
            if rows and count:
                tiles[rows] = tiles.get(rows, 0.0) + experts * share * count
    return tiles


def _rows_of_expert(pairs: int, experts: int) -> Iterator[tuple[int, float]]:
    """Yields numbers of rows, and the share of experts that have as many."""
    if experts == 1:
        yield pairs, 1.0
        return
    mean = pairs / experts
    # Shares farther from the mean are negligible.
    reach = DEVIATIONS * (1 + sqrt(mean))
    first, last = int(max(mean - reach, 1)), int(min(mean + reach, pairs))
    for rows in range(first, last + 1):
        log_ways = lgamma(pairs + 1) - lgamma(rows + 1) - lgamma(pairs - rows + 1)
        log_missed = (pairs - rows) * log(1 - 1 / experts)
        yield rows, exp(log_ways - rows * log(experts) + log_missed)


def own_times(gather: GatherProblem, device: Device) -> tuple[float, float]:
    """Returns the seconds of memory traffic and those of the issue slots."""
    problem, experts = gather.problem, gather.experts
    plan = choose_gather(gather, device)
    tiles = expected_tiles(problem.m, experts, plan.rows)
    slots = sum(
        count * _tile_slots(plan, rows, device) for rows, count in tiles.items()
    )
    read = sum(tiles.values())
    # A threadgroup scans all pairs, also if none of them chose its expert.
    scans = read + experts - gather.chosen_experts
    scan = SCAN_SLOTS * -(-problem.m // SIMD_WIDTH)
    slots += scans * scan * plan.threads / SIMD_WIDTH
    columns = -(-problem.n // TILE_N)
    read_bytes = read * gather.weights * problem.weight_bytes
    memory = memory_seconds(round(read_bytes), device)
    return memory, columns * slots / slots_per_second(device)


def _tile_slots(plan: MetalGatherPlan, rows: int, device: Device) -> float:
    """Returns the issue slots of a threadgroup for a tile that has `rows` rows."""
    problem, simdgroups = plan.problem, plan.threads // SIMD_WIDTH
    weights = TILE_N * problem.k * plan.gather.weights
    fragments_m, readers, simdgroups_k, read = 0, 1, simdgroups, rows
    operand = dots_of(plan.operand)
    if rows > plan.dot_rows:
        operand = plan.operand
        fragments_m, simdgroups_k = plan.fragments_m, plan.simdgroups_k
        # A simdgroup that has a row multiplies all of its fragments.
        readers = -(-rows // (FRAGMENT * fragments_m))
        read = readers * FRAGMENT * fragments_m
    loop = loop_slots(problem, fragments_m, operand, read, device)
    loop += readers * EXPERT_SLOTS[problem.layout] / WEIGHTS_PER_TRIP
    once, per_row = WHOLE_SLOTS[fragments_m]
    store, partial = STORE_SLOTS
    stored = rows * (store + partial * simdgroups_k)
    return weights * loop + simdgroups * (once + per_row * rows) + stored
