"""Plans for experts' products, and when stock MLX should serve them."""

from functools import lru_cache

from mlx_marlin.device import Device
from mlx_marlin.gather_plan import MOST_DOT_ROWS, GatherPlan
from mlx_marlin.plan import FRAGMENT, MAX_SIMDGROUPS
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler.cost import SCHEDULERS_PER_CORE, loop_slots, memory_seconds
from mlx_marlin.scheduler.handover import UNCALIBRATED_MARGIN
from mlx_marlin.scheduler.stock_slots import stock_slots

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


@lru_cache(maxsize=4096)
def choose_gather(problem: Problem, experts: int) -> GatherPlan:
    """Returns how the products of pairs (row, expert) are computed; cached.

    Args:
        problem: The product of one expert; its m counts all pairs.
        experts: Weights to choose from.
    """
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (experts * FRAGMENT))
    fragments_m = 1 if fragments <= 1 else 2
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


def chosen_experts(pairs: int, experts: int) -> float:
    """Returns how many experts are chosen at all, if all are as likely."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


@lru_cache(maxsize=4096)
def gather_reason(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> str | None:
    """Says why stock MLX should serve experts' products for speed; None if ours should.

    Nobody has published times of stock MLX's that this could be fitted to.
    """
    if problem.layout != "mlx" or problem.invariant:
        return None
    stock, ours = gather_seconds(problem, experts, is_sorted, device)
    ratio = stock / ours
    if ratio >= UNCALIBRATED_MARGIN:
        return None
    return (
        f"{problem.m} rows over {experts} experts on {device.variant}: the model gives "
        f"our kernels {ratio:.2f} times stock MLX's speed, and leaving it takes "
        f"{UNCALIBRATED_MARGIN:.2f}"
    )


def gather_seconds(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> tuple[float, float]:
    """Returns what stock MLX and our kernels should take for experts' products.

    Each pair chooses an expert by itself, all being as likely. Stock MLX's vector
    kernel is taken to read a weight from memory for every pair, also where the pair
    before it had the same: what caches hold of that is not known.

    Args:
        problem: The product of one expert; its m counts all pairs.
        experts: Weights to choose from.
        is_sorted: Whether pairs of an expert stand together.
        device: The chip to plan for.
    """
    return (
        _stock_seconds(problem, experts, is_sorted, device),
        _our_seconds(problem, experts, device),
    )


def _our_seconds(problem: Problem, experts: int, device: Device) -> float:
    chosen = chosen_experts(problem.m, experts)
    rows = max(round(problem.m / chosen), 1)
    plan = choose_gather(problem, experts)
    slots = loop_slots(problem, plan.fragments_m, plan.subtract, rows, device)
    passes = -(-rows // plan.rows)
    memory = memory_seconds(round(chosen * passes * problem.weight_bytes), device)
    return max(memory, _issue(chosen * problem.n * problem.k * slots, device))


def _stock_seconds(
    problem: Problem, experts: int, is_sorted: bool, device: Device
) -> float:
    one, slots = problem.weight_bytes, stock_slots(problem)
    weights = problem.n * problem.k
    if not is_sorted or problem.m < max(SORTED_ROWS, SORTED_SHARE * experts):
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
