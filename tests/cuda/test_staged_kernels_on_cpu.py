"""Hopper's kernels on the CPU: `cuda_on_cpu.py` says what stands for a GPU.

A stage of 64 rows has no room there: these tiles run on a GPU only, as do several
slices of more than 24 rows. `test_kernels_on_cpu.py` has what all kernels share.
"""

from collections.abc import Iterator
from itertools import cycle, islice, product
from typing import Any

import pytest

from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.formats import FORMATS
from support import cuda_cases
from support.cuda_cases import RING_ROWS, RING_WAYS, STAGED_WAYS, WGMMA_WAYS, Case
from support.cuda_on_cpu import SHARED_LIMIT, check, plan_of
from support.marks import needs_emulator
from support.parts_of_plans import k_range
from support.profiles import sampled

pytestmark = [needs_emulator, pytest.mark.usefixtures("on_cpu")]

SPLITS = (WGMMA_WAYS[3], STAGED_WAYS[3])
BLOCKS_EACH = 8
"""Blocks beside which a format in a dtype may be tested: enough to choose from."""


def block_of(m: int, way: dict[str, Any]) -> Plan:
    """Returns the plan of a format for its block, which formats have no part in."""
    return plan_of(("affine", 4, 64, "marlin", "float16", m, way))


BLOCKS = {
    (m, i): plan
    for i, way in enumerate(RING_WAYS)
    for m in RING_ROWS[way["kernel"]]
    if (plan := block_of(m, way)).threadgroup_bytes <= SHARED_LIMIT
}
"""By rows and way, those that the emulator has memory for."""


def every_case() -> Iterator[Case]:
    """Yields every format in each dtype with the next blocks of all."""
    blocks = cycle(BLOCKS)
    for (mode, bits, group_size), dtype in product(cuda_cases.formats(), limits.DTYPES):
        for m, i in islice(blocks, BLOCKS_EACH):
            yield mode, bits, group_size, "marlin", dtype, m, RING_WAYS[i]


def facts(case: Case) -> set[object]:
    """Returns what a covering set has to meet."""
    mode, bits, group_size, _, dtype, m, way = case
    codes = FORMATS[mode, bits].codes
    group = {32: "step 32", 128: "a stage's"}.get(group_size, "step 64")
    plan = BLOCKS[m, RING_WAYS.index(way)]
    in_halves = plan.fragments_m > limits.WHOLE_FRAGMENTS
    return {
        (codes, bits, dtype),
        (codes, group_size),
        (bits, group),
        (group_size, dtype),
        (plan.kernel, group, plan.threads > 512, bits > 4),
        (plan.kernel, plan.fragments_m, dtype),
        (plan.kernel, plan.fragments_m, group),
        ("way", RING_WAYS.index(way), in_halves),
    }


def stages_of(plan: Plan) -> list[list[int]]:
    """Returns the stages of each split of each threadgroup."""
    ranges = (
        [k_range(plan, split) for split in plan.work.splits(threadgroup)]
        for threadgroup in range(plan.num_threadgroups)
    )
    return [[-(-(stop - start) // 128) for start, stop in each] for each in ranges]


def test_what_the_emulator_has_memory_for_is_nearly_everything() -> None:
    fragments = {(plan.kernel, plan.fragments_m) for plan in BLOCKS.values()}
    of_wgmma = {("wgmma", each) for each in (2, 3, 4, 6)}
    assert fragments == of_wgmma | {("mma_staged", each) for each in (1, 2, 3, 4)}
    assert {i for _, i in BLOCKS} == {*range(len(RING_WAYS))}
    assert {plan.threads > 512 for plan in BLOCKS.values()} == {True, False}
    # Three slices have twelve stages, for which only those of 8 rows are small enough.
    assert {plan.simdgroups_k for plan in BLOCKS.values()} == {1, 2, 3}


@pytest.mark.parametrize("m", [12, 20, 30])
@pytest.mark.parametrize("way", RING_WAYS, ids=str)
def test_stages_pass_the_rings_end(way: dict[str, Any], m: int) -> None:
    plan = block_of(m, way)
    assert max(map(max, stages_of(plan))) > plan.buffers


@pytest.mark.parametrize("m", [12, 20])
@pytest.mark.parametrize("way", SPLITS, ids=str)
def test_also_with_slices_and_after_a_first_split(way: dict[str, Any], m: int) -> None:
    plan = block_of(m, way)
    assert plan.simdgroups_k > 1
    assert any(later > plan.buffers for _, *rest in stages_of(plan) for later in rest)
    # The second one begins somewhere in the ring.
    assert any(first % plan.buffers for first, *rest in stages_of(plan) if rest)


@sampled(2, 12)
@pytest.mark.parametrize("case", cuda_cases.covering(every_case(), facts), ids=str)
def test_formats(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("m", [1, 8])
def test_few_rows_are_served_too(m: int) -> None:
    check(("affine", 4, 64, "marlin", "bfloat16", m, WGMMA_WAYS[0]))
