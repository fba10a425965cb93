"""Plans for experts' products, and when stock MLX should serve them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import exp, lgamma, log, sqrt

from mlx_marlin.backends.metal.cost import (
    SCHEDULERS_PER_CORE,
    STORE_SLOTS,
    WEIGHTS_PER_TRIP,
    WHOLE_SLOTS,
    loop_slots,
    memory_seconds,
)
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts.plan import MOST_DOT_ROWS, GatherPlan
from mlx_marlin.backends.metal.limits import FRAGMENTS_M, MAX_SIMDGROUPS
from mlx_marlin.backends.metal.stock.handover import MARGIN, UNCALIBRATED_MARGIN
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.backends.metal.stock.slots import stock_slots
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH
from mlx_marlin.weights.formats import TILE_N

MAX_SIMDGROUPS_M = 4
"""Simdgroups side by side along the rows."""
SIMDGROUPS_K = 4
"""Simdgroups along k, where there is room for them."""
SORTED_ROWS = 16
"""Rows of the tile with which stock MLX reads the weights of sorted pairs, and how many
pairs it needs for that."""
SORTED_SHARE = 4
"""Pairs an expert that it needs for that."""
STOCK_TILE_SLOTS = 0.433
"""Issue slots of that tile for a weight, beyond the other slots of a tile of 32 rows:
its 8x8 products, less half of x (counted of affine 4-bit)."""

EXPERT_SLOTS = {"marlin": 30, "mlx": 62}
"""Slots of a trip of the main loop for 64-bit addresses of an expert, by layout
(counted of 4 bits)."""
SCAN_SLOTS = 55
"""Slots in which a simdgroup looks at 32 pairs (counted)."""
DEVIATIONS = 9
"""Standard deviations from the mean within which an expert's rows count."""


@lru_cache(maxsize=4096)
def choose_gather(problem: Problem, experts: int, device: Device) -> GatherPlan:
    """Returns how the products of pairs (row, expert) are computed; cached.

    Args:
        problem: The product of one expert; its m counts all pairs.
        experts: Weights to choose from.
        device: The chip to plan for.
    """
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (experts * FRAGMENT))
    fragments_m = 1 if fragments <= 1 else _most_fragments(problem, device)
    simdgroups_m = min(-(-fragments // fragments_m), MAX_SIMDGROUPS_M)
    # A row's bits are the same for any number of rows if its sum is cut alike.
    beside = MAX_SIMDGROUPS_M if problem.invariant else simdgroups_m
    return GatherPlan(
        problem=problem,
        experts=experts,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=min(SIMDGROUPS_K, MAX_SIMDGROUPS // beside),
        # A row's bits must not depend on how many rows chose its expert.
        dot_rows=0 if problem.invariant else MOST_DOT_ROWS,
        subtract=problem.invariant
        or fragments_m > 1
        or problem.dtype != "float16"
        or problem.format.codes == "floating",
    )


def _most_fragments(problem: Problem, device: Device) -> int:
    """Returns the most fragments of x of a simdgroup.

    The kernel for native codes is 11642 bytes of code with two fragments (counted). The
    M1's instruction cache holds 12 KB, and code that exceeds it runs slowly. Invariant
    plans have no dot products and thus half the code.
    """
    if problem.layout == "mlx" and not problem.invariant and device.generation == "M1":
        return 1
    return max(FRAGMENTS_M)


def chosen_experts(pairs: int, experts: int) -> float:
    """Returns how many experts are chosen at all, if all are as likely."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


@lru_cache(maxsize=4096)
def gather_reason(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> str | None:
    """Says why stock MLX should serve experts for speed; None if our kernels should."""
    if problem.layout != "mlx" or problem.invariant:
        return None
    stock, ours = gather_seconds(problem, experts, is_sorted, device)
    ratio, margin = stock / ours, _margin(problem, experts, is_sorted, device)
    if ratio >= margin:
        return None
    return (
        f"{problem.m} rows over {experts} experts on {device.variant}: the model gives "
        f"our kernels {ratio:.2f} times stock MLX's speed, and leaving it takes "
        f"{margin:.2f}"
    )


def _margin(problem: Problem, experts: int, is_sorted: bool, device: Device) -> float:
    """Returns how many times stock MLX's speed experts must have to leave it.

    Nobody has published times of stock MLX's for experts. Its vector kernel multiplies
    a pair as it does a product of one row, and times of these were fitted. What that
    leaves open is how often caches spare it the memory. It cannot win by that where
    our kernels take no longer than reading each weight once.
    """
    memory, issue = _our_times(problem, experts, device)
    one_row = stock_prediction(replace(problem, m=1), device)
    fitted = one_row.calibrated and not _shares_tiles(problem, experts, is_sorted)
    return MARGIN if fitted and issue <= memory else UNCALIBRATED_MARGIN


def gather_seconds(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> tuple[float, float]:
    """Returns what stock MLX and our kernels should take for experts' products.

    Each pair chooses an expert by itself, all being as likely; how many rows of ours
    share a reading of a weight follows from that (`expected_tiles`), and few of them
    are priced as dot products. Threadgroups are taken to be enough to load all cores
    alike. Stock MLX's vector kernel is taken to read a weight from memory for every
    pair, also where the pair before it had the same: what caches hold of that is not
    known.

    Args:
        problem: The product of one expert; its m counts all pairs.
        experts: Weights to choose from.
        is_sorted: Whether pairs of an expert stand together.
        device: The chip to plan for.
    """
    return (
        _stock_seconds(problem, experts, is_sorted, device),
        max(_our_times(problem, experts, device)),
    )


def expected_tiles(pairs: int, experts: int, most: int) -> dict[int, float]:
    """Returns how many tiles of each number of rows are to be expected.

    Each pair chooses an expert by itself, all being as likely: how many rows an expert
    has is binomial. They fill whole tiles, and the rest is one more.

    Args:
        pairs: Pairs (row, expert).
        experts: Weights to choose from.
        most: Rows of a whole tile.
    """
    tiles: dict[int, float] = {}
    for rows, share in _rows_of_expert(pairs, experts):
        whole, rest = divmod(rows, most)
        for each, count in ((most, whole), (rest, 1)):
            if each and count:
                tiles[each] = tiles.get(each, 0.0) + experts * share * count
    return tiles


def _rows_of_expert(pairs: int, experts: int) -> Iterator[tuple[int, float]]:
    """Yields numbers of rows, and the share of experts that have as many."""
    if experts == 1:
        yield pairs, 1.0
        return
    mean = pairs / experts
    # What lies further out counts nothing.
    reach = DEVIATIONS * (1 + sqrt(mean))
    first, last = int(max(mean - reach, 1)), int(min(mean + reach, pairs))
    for rows in range(first, last + 1):
        ways = lgamma(pairs + 1) - lgamma(rows + 1) - lgamma(pairs - rows + 1)
        missed = (pairs - rows) * log(1 - 1 / experts)
        yield rows, exp(ways - rows * log(experts) + missed)


def _our_times(problem: Problem, experts: int, device: Device) -> tuple[float, float]:
    """Returns the seconds of memory traffic, and those of the issue slots."""
    plan = choose_gather(problem, experts, device)
    tiles = expected_tiles(problem.m, experts, plan.rows)
    slots = sum(
        count * _tile_slots(plan, rows, device) for rows, count in tiles.items()
    )
    read = sum(tiles.values())
    # Who finds an expert's rows looks at all pairs, also where it finds none.
    looks = read + experts - chosen_experts(problem.m, experts)
    scan = SCAN_SLOTS * -(-problem.m // SIMD_WIDTH)
    slots += looks * scan * plan.threads / SIMD_WIDTH
    columns = -(-problem.n // TILE_N)
    memory = memory_seconds(round(read * problem.weight_bytes), device)
    return memory, _issue(columns * slots, device)


def _tile_slots(plan: GatherPlan, rows: int, device: Device) -> float:
    """Returns the slots of one threadgroup for a tile of so many rows."""
    problem, simdgroups = plan.problem, plan.threads // SIMD_WIDTH
    fragments_m, readers, along_k, read = 0, 1, simdgroups, rows
    if rows > plan.dot_rows:
        fragments_m, along_k = plan.fragments_m, plan.simdgroups_k
        # A simdgroup that has a row multiplies all of its fragments.
        readers = -(-rows // (FRAGMENT * fragments_m))
        read = readers * FRAGMENT * fragments_m
    loop = loop_slots(problem, fragments_m, plan.subtract, read, device)
    loop += readers * EXPERT_SLOTS[problem.layout] / WEIGHTS_PER_TRIP
    once, each = WHOLE_SLOTS[fragments_m]
    store, partial = STORE_SLOTS
    stored = rows * (store + partial * along_k)
    return TILE_N * problem.k * loop + simdgroups * (once + each * rows) + stored


def _shares_tiles(problem: Problem, experts: int, is_sorted: bool) -> bool:
    """Whether pairs of an expert share the tiles of stock MLX's matrix kernel."""
    return is_sorted and problem.m >= max(SORTED_ROWS, SORTED_SHARE * experts)


def _stock_seconds(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> float:
    one, slots = problem.weight_bytes, stock_slots(problem)
    weights = problem.n * problem.k
    if not _shares_tiles(problem, experts, is_sorted):
        # Every pair reads its weight by itself.
        memory = memory_seconds(problem.m * one, device)
        return max(memory, _issue(problem.m * weights * slots.vector, device))
    chosen = chosen_experts(problem.m, experts)
    tiles = chosen * -(-round(problem.m / chosen) // SORTED_ROWS)
    memory = memory_seconds(round(chosen * one), device)
    tile_slots = STOCK_TILE_SLOTS + slots.tile
    return max(memory, _issue(tiles * weights * tile_slots, device))


def _issue(slots: float, device: Device) -> float:
    clocks = device.cores * device.clock_ghz * 1e9
    return slots / (SCHEDULERS_PER_CORE * clocks)
