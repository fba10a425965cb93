"""Hopper's kernels on the CPU: `cuda_on_cpu.py` says what stands for a GPU.

A stage of 64 rows has no room there: these tiles run on a GPU only, as do several
slices of more than 24 rows.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import emulated, unavailable
from mlx_marlin.backends.cuda import limits, pipelined
from mlx_marlin.backends.source import OPERANDS
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.formats import FORMATS
from support import cuda_cases, epilogues, format_cases, oracles
from support.cuda_cases import (
    EPILOGUES,
    RING_ROWS,
    RING_WAYS,
    STAGED_WAYS,
    WGMMA_WAYS,
    Case,
)
from support.cuda_on_cpu import (
    SHARED_LIMIT,
    check,
    check_batch,
    check_moved,
    plan_of,
    run,
)
from support.oracles import exact
from support.parts_of_plans import k_range

pytestmark = [
    pytest.mark.skipif(
        unavailable() is not None, reason="the emulator does not run here"
    ),
    pytest.mark.usefixtures("on_cpu"),
]

WHOLES, SPLITS = (WGMMA_WAYS[0], STAGED_WAYS[0]), (WGMMA_WAYS[3], STAGED_WAYS[3])
EVERYTHING = Epilogue(bias=True, activation="gelu", multiply=True, residual=True)
PARTS = EPILOGUES[-1]
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
    """Returns what a covering set has to meet: all that chooses another text."""
    mode, bits, group_size, _, dtype, m, way = case
    codes = FORMATS[mode, bits].codes
    group = {32: "step 32", 128: "a stage's"}.get(group_size, "step 64")
    plan = BLOCKS[m, RING_WAYS.index(way)]
    in_halves = plan.fragments_m > pipelined.WHOLE_FRAGMENTS
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


def covering() -> list[Case]:
    """Returns few cases that meet every fact."""
    cases = [*every_case()]
    chosen = format_cases.covering(range(len(cases)), lambda i: facts(cases[i]))
    return [cases[i] for i in chosen]


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


@pytest.mark.parametrize("way", RING_WAYS, ids=str)
def test_all_ways_but_data_parallel_split_tiles(way: dict[str, Any]) -> None:
    plan = block_of(12, way)
    splits = Counter(
        split.tile
        for threadgroup in range(plan.num_threadgroups)
        for split in plan.work.splits(threadgroup)
    )
    assert (max(splits.values()) > 1) == (plan.strategy != "data_parallel")


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


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", covering(), ids=str)
def test_formats(case: Case) -> None:
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*every_case()], ids=str)
def test_every_format(case: Case) -> None:
    check(case)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("way", "dtype", "m"),
    [
        (way, *each)
        for way, each in zip(
            RING_WAYS, cycle((("float16", 19), ("bfloat16", 12))), strict=False
        )
    ],
    ids=str,
)
def test_integers_are_exact(way: dict[str, Any], dtype: str, m: int) -> None:
    weight, x, expected = cuda_cases.integers(dtype, m, way)
    y = run(plan_of(("affine", 4, 64, "marlin", dtype, m, way)), x, weight)
    assert np.array_equal(exact(y), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("way", "dtype", "m"),
    [
        (SPLITS[0], "float16", 40),
        (SPLITS[0], "bfloat16", 26),
        (SPLITS[1], "float16", 30),
        (SPLITS[1], "bfloat16", 7),
    ],
    ids=str,
)
def test_integers_of_other_tiles_are_exact(
    way: dict[str, Any], dtype: str, m: int
) -> None:
    weight, x, expected = cuda_cases.integers(dtype, m, way)
    y = run(plan_of(("affine", 4, 64, "marlin", dtype, m, way)), x, weight)
    assert np.array_equal(exact(y), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", [*WHOLES, *SPLITS], ids=str)
@pytest.mark.parametrize("epilogue", [EVERYTHING, PARTS], ids=Epilogue.explain)
def test_epilogues(way: dict[str, Any], epilogue: Epilogue) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 19, way)
    weight, x = cuda_cases.draw(case)
    finish = cuda_cases.operands(19)
    plan = plan_of(case, epilogue=epilogue)
    assert plan.needs_second_pass == (way in SPLITS)
    y = epilogues.whole(run(plan, x, weight, *finish))
    expected = epilogues.finished(exact(x) @ weight.decoded.T, finish, epilogue)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", [*WHOLES, *SPLITS], ids=str)
def test_batches(way: dict[str, Any]) -> None:
    check_batch(("affine", 4, 64, "marlin", "float16", 10, way))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("moved", [OPERANDS, ("x",), ("w",), ("scales",)], ids=str)
@pytest.mark.parametrize(
    ("bits", "m", "way"),
    [
        (3, 12, WHOLES[0]),
        (8, 36, WHOLES[0]),
        (4, 20, WHOLES[1]),
        (4, 30, WHOLES[1]),
    ],
    ids=str,
)
def test_arrays_may_begin_anywhere(
    bits: int, m: int, way: dict[str, Any], moved: tuple[str, ...]
) -> None:
    check_moved(("affine", bits, 64, "marlin", "float16", m, way), moved)


@pytest.mark.parametrize("way", SPLITS, ids=str)
def test_a_global_scale(way: dict[str, Any]) -> None:
    case: Case = ("nvfp4", 4, 16, "marlin", "float16", 10, way)
    drawn, x = cuda_cases.draw(case)
    weight = replace(drawn, global_scale=mx.array(format_cases.GLOBAL_SCALE))
    y = run(plan_of(case, global_scale=True), x, weight)
    cuda_cases.assert_right(y, x, weight.decoded, "float16")


@pytest.mark.parametrize("m", [1, 8])
def test_few_rows_are_served_too(m: int) -> None:
    check(("affine", 4, 64, "marlin", "bfloat16", m, WHOLES[0]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("way", "bits", "group_size", "m"),
    [
        (way, *each)
        for way, each in zip(
            RING_WAYS, cycle(((4, 32, 12), (6, 128, 28), (4, 128, 20))), strict=False
        )
    ],
    ids=str,
)
def test_no_race_and_nothing_read_that_is_not_there(
    bits: int, group_size: int, m: int, way: dict[str, Any]
) -> None:
    case: Case = ("affine", bits, group_size, "marlin", "float16", m, way)
    with emulated(trace=True):
        check(case)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("group_size", [32, 128])
def test_no_race_where_loaders_bring_halves(group_size: int) -> None:
    case: Case = ("affine", 4, group_size, "marlin", "bfloat16", 40, SPLITS[0])
    with emulated(trace=True):
        check(case)
