"""Plans for experts' products on Apple GPUs, and the cost model behind them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import exp, lgamma, log, sqrt

from mlx_marlin.backends.metal.cost.main_loop import WEIGHTS_PER_TRIP, loop_slots
from mlx_marlin.backends.metal.cost.predict import STORE_SLOTS, WHOLE_SLOTS
from mlx_marlin.backends.metal.cost.rates import SCHEDULERS_PER_CORE, memory_seconds
from mlx_marlin.backends.metal.cost.residency import fits
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts.plan import MAX_DOT_ROWS, MetalGatherPlan
from mlx_marlin.backends.metal.limits import (
    FRAGMENTS_M,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
)
from mlx_marlin.backends.metal.operands import dots_of, operand_of
from mlx_marlin.backends.metal.stock.margin import ONE_ROW_MARGIN, UNCALIBRATED_MARGIN
from mlx_marlin.backends.metal.stock.prediction import stock_prediction, tensor_slots
from mlx_marlin.backends.metal.stock.slots import stock_slots, vector_slots
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

SIMDGROUPS_K = 4
"""Simdgroups along k, unless that exceeds the limit of a threadgroup."""
SORTED_ROWS = 16
"""Rows of the tile of stock MLX's kernel for sorted pairs, and the least number of
pairs for which stock MLX uses it."""
SORTED_PAIRS_PER_EXPERT = 4
"""Pairs per expert from which stock MLX uses that kernel."""
TENSOR_ROWS = (32, 64)
"""Rows of the tile of its kernel for tensor units: the larger one from as many pairs
per expert on."""
STOCK_TILE_SLOTS = 0.433
"""Issue slots of that tile for a weight, in addition to the other slots of a tile of 32
rows: its 8x8 products, less half of x (counted for affine 4-bit)."""

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
    return next((plan for plan in plans if fits(plan, device)), plans[-1])


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


def gather_handover(gather: GatherProblem, device: Device) -> str | None:
    """Returns why stock MLX should serve experts' products for speed, or None."""
    problem = gather.problem
    if problem.layout != "mlx" or problem.invariant:
        return None
    stock, ours = gather_seconds(gather, device)
    ratio, margin = stock / ours, _margin(gather, device)
    if ratio >= margin:
        return None
    return (
        f"{problem.m} rows over {gather.experts} experts on {device.variant}: the "
        f"model gives our kernels {ratio:.2f} times stock MLX's speed, and leaving it "
        f"takes {margin:.2f}"
    )


def _margin(gather: GatherProblem, device: Device) -> float:
    """Returns the speedup over stock MLX that the model must predict to leave it.

    There are no published times of stock MLX's kernels for experts. Its vector kernel
    multiplies a pair like a product of one row, for which times were fitted. That
    leaves open how often caches hold a weight that was read for another pair. It makes
    no difference where our kernels need no more time than reading each weight once.
    """
    memory, issue = _own_times(gather, device)
    one_row = stock_prediction(replace(gather.problem, m=1), device)
    fitted = one_row.calibrated and not _shares_tiles(gather)
    return ONE_ROW_MARGIN if fitted and issue <= memory else UNCALIBRATED_MARGIN


def gather_seconds(gather: GatherProblem, device: Device) -> tuple[float, float]:
    """Returns the predicted times of stock MLX and of our kernels.

    The model assumes that every pair chooses an expert independently and that all
    experts are equally likely; from that follows how many rows share a reading of a
    weight (`expected_tiles`). Tiles of few rows are priced as dot products. There are
    assumed to be enough threadgroups to load all cores equally. Stock MLX's vector
    kernel is assumed to read a weight from memory for every pair, even if the previous
    pair had the same expert: the hit rate of the caches is not known.
    """
    stock = gather.weights * _stock_seconds(gather, device)
    return stock, max(_own_times(gather, device))


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


def _own_times(gather: GatherProblem, device: Device) -> tuple[float, float]:
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
    return memory, _issue(columns * slots, device)


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


def _shares_tiles(gather: GatherProblem) -> bool:
    """Returns whether stock MLX's matrix kernel serves, whose tiles pairs share."""
    least = max(SORTED_ROWS, SORTED_PAIRS_PER_EXPERT * gather.experts)
    return gather.is_sorted and gather.problem.m >= least


def _stock_seconds(gather: GatherProblem, device: Device) -> float:
    problem = gather.problem
    expert_bytes, weights = problem.weight_bytes, problem.n * problem.k
    if not _shares_tiles(gather):
        # Every pair reads its weight by itself.
        memory = memory_seconds(problem.m * expert_bytes, device)
        slots = problem.m * weights * vector_slots(problem, device)
        return max(memory, _issue(slots, device))
    chosen = gather.chosen_experts
    rows, tile_slots = _sorted_tile(gather, device)
    tile_slots += stock_slots(problem).tile
    tiles = chosen * -(-round(problem.m / chosen) // rows)
    memory = memory_seconds(round(chosen * expert_bytes), device)
    return max(memory, _issue(tiles * weights * tile_slots, device))


def _sorted_tile(gather: GatherProblem, device: Device) -> tuple[int, float]:
    """Returns the rows of a tile of stock MLX's kernel for sorted pairs, and its slots.

    The slots are those of its matrix products for a weight. On tensor units they take
    as long as in the dense kernel.
    """
    if not device.has_tensor_units:
        return SORTED_ROWS, STOCK_TILE_SLOTS
    few = gather.problem.m < TENSOR_ROWS[1] * gather.experts
    rows = TENSOR_ROWS[0 if few else 1]
    return rows, tensor_slots(rows, device)


def _issue(slots: float, device: Device) -> float:
    return slots / (SCHEDULERS_PER_CORE * device.clocks)
