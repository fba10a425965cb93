"""The small problems of the guard run the kernels of the plan that is checked."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.backends import graph, planner, registry
from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import instances
from mlx_marlin.guard import known_answers, operands, reference
from mlx_marlin.guard.miniatures import AnyPlan, instances_of, miniatures
from mlx_marlin.guard.reference import KernelError
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import DTYPE_BYTES, MODES
from support import cuda_on_cpu
from support.cuda_cases import GATED, GATED_N, NORMED_HEADS, ROTATED_N, ROTATION, h200
from support.guarded_calls import LARGE, formats, of_experts
from support.marks import needs_emulator
from support.profiles import sampled

DEVICE = named("Apple M3 Max", None)
MOST_BYTES = 2**20
EPILOGUES = (
    PLAIN,
    Epilogue(bias=True, activation="gelu"),
    Epilogue(activation="silu", multiply=True, residual=True),
    Epilogue(activation="gelu_approx", residual=True),
)
ROWS = (1, 2, 5, 8, 13, 33)


OF_4_BITS = sorted(
    {(each["mode"], each["layout"]) for each in formats() if each["bits"] == 4}
)


def bytes_of(plan: AnyPlan) -> int:
    weights = getattr(plan, "experts", 1)
    return plan.problem.bytes + (weights - 1) * plan.problem.weight_bytes


def assert_same_variants(plan: AnyPlan) -> AnyPlan:
    smaller = miniatures(plan)
    for small in smaller:
        assert small is not plan, plan.explain()
        assert instances_of(small) == instances_of(plan)
    return smaller[0]


@sampled(2, 6)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("mode", "layout"), OF_4_BITS)
def test_every_instance_has_a_small_problem(mode: str, layout: str, dtype: str) -> None:
    form: dict[str, Any] = {"mode": mode, "bits": 4, "layout": layout}
    for variant in instances.variants(dtype=dtype, experiments=True, **form):
        small = assert_same_variants(variant.plan)
        assert bytes_of(small) < MOST_BYTES


def test_every_candidate_of_metal_has_a_small_problem_with_its_edges() -> None:
    draw = random.Random(0)
    for form in formats():
        batch = draw.choice((1, 3))
        parts = (LARGE - 700, 300, 400)
        problem = problem_of(
            draw.choice(ROWS),
            draw.choice((LARGE, LARGE - 6)),
            LARGE,
            dtype=draw.choice([*DTYPE_BYTES]),
            batch=batch,
            epilogue=draw.choice(EPILOGUES),
            **form,
        )
        if problem.n == LARGE and batch == 1 and draw.random() < 0.3:
            problem = replace(problem, epilogue=Epilogue(bias=True, parts=parts))
        for candidate in planner.compare(problem, device=DEVICE).candidates[::7]:
            plan = candidate.plan
            small = assert_same_variants(plan)
            assert isinstance(small, Plan)
            assert small.is_split == plan.is_split
            assert (
                small.problem.groups >= 2 or small.problem.group_size == small.problem.k
            )
            assert bytes_of(small) < MOST_BYTES


@pytest.mark.parametrize("m", [1, 8, 16, 30, 64])
def test_every_candidate_of_cuda_has_a_small_problem(m: int) -> None:
    for form in ({}, {"mode": "nvfp4"}, {"bits": 3, "group_size": 32}):
        problem = problem_of(m, LARGE, LARGE, layout="marlin", **form)
        for epilogue, norm in (
            (PLAIN, None),
            (Epilogue(bias=True, activation="silu"), None),
            (PLAIN, 1e-5 if m <= 4 else None),
            (Epilogue(activation="silu", gated=True), None),
            (Epilogue(rotation=ROTATION, bias=True), None),
        ):
            asked = replace(problem, epilogue=epilogue, norm=norm)
            if limits.why_not(asked):
                continue
            choice = planner.compare(asked, device=h200())
            for candidate in choice.candidates[::5]:
                assert_same_variants(candidate.plan)


@pytest.mark.parametrize(
    ("pairs", "pairs_per_row"), [(2, 2), (8, 2), (60, 2), (57, 19)]
)
@pytest.mark.parametrize("n", [LARGE, LARGE - 6])
def test_experts_have_a_small_problem(n: int, pairs: int, pairs_per_row: int) -> None:
    for dtype, layout in product(DTYPE_BYTES, ("mlx", "marlin")):
        problem = problem_of(pairs, n, 2048, dtype=dtype, layout=layout)
        plain = GatherProblem(problem=problem, experts=16, pairs_per_row=pairs_per_row)
        small = assert_same_variants(planner.choose_gather(plain, DEVICE))
        assert bytes_of(small) < MOST_BYTES
        if dtype == "float32" or layout == "mlx":
            continue
        for gate in (None, "silu") if n % 32 == 0 else (None,):
            asked = replace(plain, gate=gate)
            small = assert_same_variants(planner.choose_gather(asked, h200()))
            assert bytes_of(small) < MOST_BYTES


@needs_emulator
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@sampled(1)
def test_right_kernels_of_metal_pass(mode: str, dtype: str, backend: Any) -> None:
    """No known answer is tighter than what a right kernel gives."""
    backend("emulator")
    draw = random.Random(f"{mode} {dtype}")
    known = [each for each in formats() if each["mode"] == mode]
    for _ in range(3):
        problem = problem_of(
            draw.choice(ROWS),
            draw.choice((LARGE, LARGE - 6)),
            LARGE,
            dtype=dtype,
            batch=draw.choice((1, 1, 3)),
            epilogue=draw.choice(EPILOGUES),
            **draw.choice(known),
        )
        if mode == "nvfp4" and problem.layout == "marlin":
            problem = replace(problem, global_scale=draw.random() < 0.5)
        candidates = planner.compare(problem, device=DEVICE).candidates
        assert known_answers.fault_of(draw.choice(candidates).plan) is None


@sampled(1)
@needs_emulator
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_right_kernels_of_experts_and_decoding_pass(
    mode: str, layout: str, backend: Any
) -> None:
    backend("emulator")
    for dtype in ("float16", "bfloat16"):
        problem = problem_of(20, LARGE, LARGE, mode=mode, layout=layout, dtype=dtype)
        assert (
            known_answers.fault_of(
                planner.choose_gather(of_experts(problem, 8), DEVICE)
            )
            is None
        )
        assert known_answers.fault_of(dequantize_plan(problem)) is None


@sampled(2)
@needs_emulator
@pytest.mark.parametrize(
    ("m", "epilogue", "norm"),
    [
        (1, PLAIN, None),
        (16, Epilogue(bias=True, activation="gelu", residual=True), None),
        (4, PLAIN, 1e-5),
        (9, GATED, None),
        (3, Epilogue(rotation=ROTATION), None),
        (5, Epilogue(rotation=NORMED_HEADS, bias=True, parts=(128, 64, 64)), None),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_right_kernels_of_cuda_pass(
    dtype: str, m: int, epilogue: Epilogue, norm: float | None, on_cpu: None
) -> None:
    n = {True: GATED_N}.get(epilogue.gated, ROTATED_N)
    problem = problem_of(
        m, n, 1024, layout="marlin", epilogue=epilogue, norm=norm, dtype=dtype
    )
    few = {"kernel": "mma", "simdgroups_n": 2, "simdgroups_k": 2}
    plan = planner.make(problem, device=h200(), **few)
    assert plan.threadgroup_bytes <= cuda_on_cpu.SHARED_LIMIT
    assert known_answers.fault_of(plan) is None


@sampled(2)
@needs_emulator
@pytest.mark.parametrize(
    ("gate", "bias"),
    [(None, False), (None, True), ("silu", False), ("swiglu_oai", True)],
)
@pytest.mark.parametrize("pairs", [2, 12])
def test_right_kernels_of_cudas_experts_pass(
    pairs: int, gate: str | None, bias: bool, on_cpu: None
) -> None:
    problem = problem_of(pairs, 256, 512, layout="marlin")
    plan = planner.choose_gather(of_experts(problem, 4, gate, bias), h200())
    assert known_answers.fault_of(plan) is None


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"epilogue": Epilogue(parts=(256, 128, 128))},
    {"epilogue": Epilogue(bias=True, parts=(256, 256), activation="silu")},
    {"epilogue": GATED},
    {"epilogue": Epilogue(rotation=ROTATION)},
    {"epilogue": Epilogue(rotation=NORMED_HEADS, parts=(128, 64, 64), bias=True)},
    {"norm": 1e-5},
    {"epilogue": GATED, "norm": 1e-5},
    {"batch": 3},
    {"invariant": True},
    {"global_scale": True, "mode": "nvfp4", "bits": 4, "group_size": 16},
)


FIELDS = ("invariant", "global_scale", "norm", "epilogue")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Makes every kernel raise an error of the type that is returned."""

    class NoKernelError(Exception):
        pass

    def none(*_: Any, **__: Any) -> Any:
        raise NoKernelError

    for name in ("product", "gather_product", "decoded_blocks", "call"):
        monkeypatch.setattr(graph, name, none)
    return NoKernelError


@sampled(11)
@pytest.mark.parametrize("chip", ["Apple M3 Max", "Apple M5 Max", "NVIDIA H200"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: "-".join(each) or "plain")
def test_a_check_of_every_kind_of_plan_can_be_made(
    change: dict[str, Any], chip: str, no_kernels: type[Exception]
) -> None:
    """A check never raises, whatever the plan."""
    n = ROTATED_N if "rotation=R" in str(change) else 512
    device = named(chip)
    backend = registry.of_device(device)
    tried = 0
    for m in (1, 3, 8, 64, 512):
        given = {"layout": "marlin"} | change
        fields = {name: given.pop(name) for name in FIELDS if name in given}
        try:
            problem = replace(problem_of(m, n, 1024, **given), **fields)
        except ValueError:
            continue  # such as a norm of many rows
        if backend.unsupported(problem, device) is not None:
            continue
        plans: list[AnyPlan] = [
            each.plan for each in planner.compare(problem, device=device).candidates
        ]
        if problem.batch == 1:
            plans.append(dequantize_plan(problem))
        for plan in plans:
            with pytest.raises(KernelError) as raised:
                known_answers.fault_of(plan)
            assert type(raised.value.__cause__) is no_kernels
            tried += 1
    rotates = problem.epilogue.rotation is not None
    assert tried or (rotates and backend.name == "metal")


REGISTER = {"kernel": "gemm_register", "strategy": "data_parallel"}
SPLIT = {"kernel": "gemm_register", "strategy": "split_k", "k_parallel": 2}
SIZES: list[tuple[Any, dict[str, Any], dict[str, Any], int, int]] = [
    # Columns beyond whole tiles, and what k is a multiple of at least twice.
    (DEVICE, {"m": 3, "batch": 3}, {"kernel": "gemv"}, 32, 64),
    (DEVICE, {"m": 3, "n": 4090}, {"kernel": "gemv"}, 19, 64),
    (DEVICE, {"m": 9, "invariant": True}, REGISTER, 32, 64),
    (DEVICE, {"m": 40, "n": 4090}, REGISTER, 19, 64),
    (DEVICE, {"m": 9, "group_size": 32}, SPLIT, 32, 32),
    (DEVICE, {"m": 9, "group_size": 256, "layout": "marlin"}, REGISTER, 32, 256),
    (DEVICE, {"m": 9, "mode": "k_quant", "layout": "marlin"}, REGISTER, 32, 256),
    (DEVICE, {"m": 64}, {"kernel": "gemm_staged"}, 32, 64),
    (named("Apple M5 Max"), {"m": 24}, {"kernel": "gemm_tensor"}, 19, 64),
    *(
        (h200(), {"layout": "marlin", **change}, {}, 19, 64)
        for change in (
            *({"m": m} for m in (1, 16, 30, 64)),
            {"m": 3, "norm": 1e-5},
            {"m": 8, "norm": 1e-5},
            {"m": 8, "n": 256, "epilogue": Epilogue(rotation=ROTATION)},
            {"m": 8, "epilogue": GATED},
        )
    ),
]


@pytest.mark.parametrize(
    ("device", "change", "options", "tail", "unit"), SIZES, ids=str
)
def test_small_problems_have_the_least_sizes_with_edges(
    device: Any, change: dict[str, Any], options: dict[str, Any], tail: int, unit: int
) -> None:
    """Three rows miss in two tiles, and some slices of k have two k tiles."""
    problem = problem_of(**{"n": LARGE, "k": LARGE, **change})
    plan = planner.make(problem, device=device, **options)
    tile, few = plan.tile, problem.norm is not None
    rows = {"gemv": tile.m}.get(plan.kernel, (plan.row_limit or 2 * tile.m) - 3)
    columns = tail + (96 if tile.n == 32 else tile.n)
    if plan.has_wide_tiles:
        columns = plan.wide_n + 32 + tail
    if problem.epilogue.rotation is not None or problem.epilogue.gated:
        columns = problem.n if problem.epilogue.rotation else 2 * tile.n
    least = max(2 * unit, (plan.simdgroups_k + 2) * tile.k)
    if plan.buffers:
        least = max(least, (plan.buffers + 1) * plan.stage_k)
    k = -(-least // unit) * unit
    k += 32 if unit == 32 and k % 64 == 0 else 0  # half of a packed tile
    for small in miniatures(plan):
        found = small.problem
        assert found.m == (min(problem.m, 5) if few else rows)
        assert (found.n, found.k, found.group_size) == (columns, k, problem.group_size)
        assert (found.batch, found.invariant) == (min(problem.batch, 2), False)


def test_small_problems_of_whole_rows_have_a_k_that_is_no_other_group_size() -> None:
    whole: dict[str, Any] = {"group_size": LARGE, "layout": "marlin"}
    found = []
    for m, options in ((40, {"kernel": "gemm_register"}), (9, REGISTER)):
        problem = problem_of(m, LARGE, LARGE, **whole)
        plan = planner.make(problem, device=DEVICE, **options)
        small = miniatures(plan)[0].problem
        found.append((plan.simdgroups_k, small.k, small.group_size))
    assert found == [(1, 192, 192), (2, 320, 320)]  # not 256


SMALL_WORK: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        SPLIT,
        [
            {"strategy": "split_k", "slices": 2, "threadgroups": 16},
            {"strategy": "stream_k", "slices": 5, "threadgroups": 15},
            {"strategy": "stream_k", "slices": 5, "threadgroups": 12, "groups": 2},
            {"strategy": "hybrid", "slices": 5, "threadgroups": 10, "whole": 1},
            {
                "strategy": "stripe",
                "slices": 3,
                "threadgroups": 22,
                "partition": "ceil",
            },
        ],
    ),
    (
        REGISTER | {"strategy": "stripe", "k_parallel": 1, "num_threadgroups": 3},
        [{"strategy": "stripe", "threadgroups": each} for each in (7, 9)],
    ),
    (REGISTER, [{"strategy": "data_parallel", "threadgroups": 8, "whole": 8}]),
]


@pytest.mark.parametrize(("options", "works"), SMALL_WORK, ids=str)
def test_each_division_of_the_work_ends_in_the_midst_of_tiles(
    options: dict[str, Any], works: list[dict[str, Any]]
) -> None:
    plan = planner.make(
        problem_of(9, LARGE, LARGE, group_size=32), device=DEVICE, **options
    )
    step = (plan.simdgroups_k + 2) * plan.tile.k + 32
    k_tiles = -(-step // plan.tile.k)
    expected = [Work(tiles=8, k_tiles=k_tiles, **each) for each in works]
    assert [small.work for small in miniatures(plan)] == expected


@pytest.mark.parametrize(("per_row", "pairs"), [(0, 8), (19, 57), (8, 400), (2, 2)])
@pytest.mark.parametrize("device", [DEVICE, h200()], ids=lambda each: each.name)
@pytest.mark.parametrize("n", [LARGE, LARGE - 6])
def test_small_problems_of_experts_fill_a_tile_of_one_and_leave_some_without(
    n: int, device: Any, per_row: int, pairs: int
) -> None:
    problem = problem_of(pairs, n, 2048, layout="marlin", invariant=True)
    gather = GatherProblem(problem=problem, experts=16, pairs_per_row=per_row)
    plan = planner.choose_gather(gather, device)
    (found,) = miniatures(plan)
    small, per_row = found.problem, plan.pairs_per_row
    count = 10 if plan.by_pair else 2 * plan.rows + 2 * 32 + 5
    count += -count % (per_row or 1)
    experts = count + 2 if plan.by_pair else 5
    assert (small.m, found.experts, found.pairs_per_row) == (count, experts, per_row)
    assert small.n == plan.columns + (19 if plan.has_ragged_tiles else 32)
    assert (small.k, small.invariant) == (64 * (plan.simdgroups_k + 2), False)


def test_the_parts_of_a_small_problem_differ_and_decoding_has_no_epilogue() -> None:
    problem = problem_of(
        9, LARGE, LARGE, epilogue=Epilogue(parts=(3000, 596, 500), bias=True)
    )
    (small,) = miniatures(planner.make(problem, device=DEVICE, **REGISTER))
    assert small.problem.epilogue == Epilogue(parts=(42, 41, 45), bias=True)
    decoding = problem_of(300, LARGE, LARGE, layout="marlin", norm=1e-5, invariant=True)
    decoding = replace(decoding, epilogue=Epilogue(bias=True))
    plain = problem_of(1, 51, 192, layout="marlin")
    assert miniatures(dequantize_plan(decoding)) == tuple(
        DequantizePlan(problem=plain, transposed=transposed, chunk=chunk)
        for transposed, chunk in ((True, 32), (False, 64))
    )


@needs_emulator
@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_right_kernels_around_cudas_experts_pass(
    of_all: bool, last: bool, on_cpu: None
) -> None:
    route = RoutePlan(1, "bfloat16", 40, 4, of_all, last)
    for plan in (route, CombinePlan(1, "float16", 72, 4)):
        assert known_answers.fault_of(plan) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("epilogue", [PLAIN, GATED, *EPILOGUES[1:]], ids=str)
def test_the_exact_answer_rounded_once_passes(
    epilogue: Epilogue, mode: str, dtype: str
) -> None:
    problem = problem_of(
        5, 512, 2048, mode=mode, layout="marlin", dtype=dtype, epilogue=epilogue
    )
    x = operands.activations(problem, (problem.m, problem.k))
    arrays = known_answers._drawn_epilogue_arrays(problem)
    with mx.stream(mx.cpu):
        weight = operands.draw(problem)
        answer = reference.product(problem, x, weight, arrays)
        rounded = answer.values.astype(getattr(mx, dtype))
    assert reference.difference(rounded, answer) is None
