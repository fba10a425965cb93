"""Registers: the model chooses no plan that takes more of them than a thread has."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal.choice import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan, gather_unsupported
from mlx_marlin.backends.metal.kernel_limits import NORM_ROWS
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import CHANNEL, DTYPE_BYTES, FORMATS
from support.profiles import sampled

GENERATIONS = ("M1 Max", "M2", "M3 Max", "M4 Pro", "M5 Max")
GATED = Epilogue(activation="silu", gated=True)
ROWS = (1, 2, 3, 4, 5, 8, 16, 24, 64)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"epilogue": GATED},
    {"norm": 1e-5},
    {"norm": 1e-5, "epilogue": GATED},
    {"batch": 3},
    {"invariant": True},
)

PARTS = 7  # coprime to the numbers of kinds: each part has some of all


def fits(plan: MetalPlan | MetalGatherPlan, device: Device) -> bool:
    return plan.registers <= device.core.thread_registers


def every_problem() -> Iterator[Problem]:
    """Yields products of all formats, layouts, dtypes, fusions and some rows."""
    n, k = 4096, 2048
    for format, dtype, m, kind in product(FORMATS.values(), DTYPE_BYTES, ROWS, KINDS):
        if "norm" in kind and m > NORM_ROWS:
            continue
        for layout in format.layouts:
            for size in format.group_sizes_in(layout):
                yield problem_of(
                    m,
                    n,
                    k,
                    mode=format.mode,
                    bits=format.bits,
                    group_size=k if size == CHANNEL else size,
                    dtype=dtype,
                    layout=layout,
                    **kind,
                )


@sampled(1, 3)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("chip", GENERATIONS)
def test_every_candidate_has_its_registers(chip: str, part: int) -> None:
    device = Device.named(chip)
    count = 0
    for problem in islice(every_problem(), part, None, PARTS):
        for candidate in candidates(problem, device, {}):
            count += 1
            plan = candidate.plan
            assert isinstance(plan, MetalPlan)
            assert plan.threads <= 256  # more were refused of a kernel of this size
            if problem.norm is None:
                assert fits(plan, device), plan.explain()
            elif not fits(plan, device):  # no other kernel has a norm
                reason = metal.handover(problem, device)
                assert "more registers than a thread has" in str(reason)
    assert count > 10_000 / PARTS


@sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("chip", GENERATIONS)
def test_every_plan_of_experts_has_its_registers(chip: str, part: int) -> None:
    device = Device.named(chip)
    for problem in islice(every_problem(), part, None, PARTS):
        if problem.epilogue != PLAIN or problem.norm is not None or problem.batch > 1:
            continue
        for pairs, gate, bias in product((8, 4096), (None, "silu"), (False, True)):
            gather = GatherProblem(
                problem=replace(problem, m=pairs), experts=32, gate=gate, bias=bias
            )
            if gather_unsupported(gather) is None:
                plan = planner.choose_gather(gather, device)
                assert isinstance(plan, MetalGatherPlan)
                assert fits(plan, device), plan.explain()


@pytest.mark.parametrize(
    ("form", "kernel", "fragments_m", "halves"),
    [
        ({"m": 1}, "gemv", 0, 80),
        ({"m": 5}, "gemv", 0, 180),
        ({"m": 5, "layout": "marlin"}, "gemv", 0, 176),
        ({"m": 3, "dtype": "bfloat16"}, "gemv", 0, 154),
        ({"m": 8, "dtype": "bfloat16"}, "gemm_register", 1, 110),
        ({"m": 16}, "gemm_register", 2, 130),
        ({"m": 16, "dtype": "bfloat16"}, "gemm_register", 2, 166),
        ({"m": 16, "dtype": "bfloat16", "bits": 8}, "gemm_register", 2, 178),
        ({"m": 16, "dtype": "float32", "bits": 8}, "gemm_register", 2, 190),
        ({"m": 16, "mode": "mxfp4", "layout": "marlin"}, "gemm_register", 2, 104),
        ({"m": 2, "norm": 1e-5, "layout": "marlin"}, "gemv", 0, 164),
        ({"m": 2, "norm": 1e-5, "epilogue": GATED, "bits": 8}, "gemv", 0, 200),
    ],
    ids=str,
)
def test_registers_are_near_the_counts_of_a_compiler(
    form: dict[str, Any], kernel: str, fragments_m: int, halves: int
) -> None:
    """Counted in halves of 16 bits (docs/lab/2026-11-26-slots.md)."""
    form = {"dtype": "float16", "n": 4096, "k": 4096, **form}
    plan = planner.make(
        problem_of(form.pop("m"), form.pop("n"), form.pop("k"), **form),
        device=Device.named("M1 Max"),
        kernel=kernel,
        strategy="data_parallel",
    )

    assert isinstance(plan, MetalPlan)
    assert plan.fragments_m == fragments_m
    assert abs(plan.registers - halves / 2) <= 5


def test_ranges_gates_and_batches_take_more() -> None:
    m1 = Device.named("M1 Max")

    def count(strategy: str = "data_parallel", **fields: Any) -> int:
        form: dict[str, Any] = {"n": 8192, "layout": "marlin", **fields}
        problem = problem_of(2, form.pop("n"), 4096, **form)
        plan = planner.make(
            problem,
            device=m1,
            kernel="gemv",
            strategy=strategy,  # type: ignore[arg-type]
        )
        assert isinstance(plan, MetalPlan)
        return plan.registers

    plain = count()
    assert count("stripe") == plain + 7
    assert count(layout="mlx", n=8191) == count(layout="mlx") + 6
    assert count(epilogue=GATED) == plain + 1
    assert count(batch=3) == plain + 2
    assert count(norm=1e-5) > count(dtype="bfloat16") > plain


@pytest.mark.parametrize(
    ("form", "chosen", "larger"),
    [
        ({"m": 5, "bits": 8}, ("gemm_register", 1), ("gemv", 0)),
        ({"m": 4, "dtype": "bfloat16", "bits": 8}, ("gemm_register", 1), ("gemv", 0)),
        (
            {"m": 16, "dtype": "float32", "bits": 5},
            ("gemm_register", 1),
            ("gemm_register", 2),
        ),
    ],
    ids=str,
)
def test_a_plan_above_the_limit_can_be_made_and_a_tuner_tries_it(
    form: dict[str, Any], chosen: tuple[str, int], larger: tuple[str, int]
) -> None:
    problem = problem_of(form.pop("m"), 4096, 4096, **form)
    m4, m1 = Device.named("M4 Pro"), Device.named("M1 Max")
    kernel, fragments_m = larger

    plan = planner.choose(problem, m4)
    made = planner.make(
        problem,
        device=m4,
        kernel=kernel,  # type: ignore[arg-type]
        fragments_m=fragments_m,
    )
    without = planner.choose(problem, m1)

    assert (plan.kernel, plan.fragments_m) == chosen
    assert (without.kernel, without.fragments_m) == larger
    assert isinstance(made, MetalPlan)
    assert not fits(made, m4)
    assert fits(made, m1)
    tried = [
        (each.kernel, each.fragments_m) for each in planner.experiments(problem, m4)
    ]
    assert tried[0] == larger


@pytest.mark.parametrize(("m", "tried"), [(16, 0), (17, 1), (24, 1), (25, 0)])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_only_a_race_tries_three_fragments(layout: str, m: int, tried: int) -> None:
    problem = problem_of(m, 4096, 4096, layout=layout)
    m4 = Device.named("M4 Pro")
    chosen = planner.choose(problem, m4)

    others = [each.fragments_m for each in planner.experiments(problem, m4)]

    assert chosen.fragments_m == 2
    assert others.count(3) == tried


def test_experts_have_fewer_fragments_then_fewer_dot_products() -> None:
    def chosen(chip: str, **form: Any) -> tuple[int, int]:
        gather = GatherProblem(problem=problem_of(4096, 768, 2048, **form), experts=8)
        plan = planner.choose_gather(gather, Device.named(chip))
        assert isinstance(plan, MetalGatherPlan)
        return plan.fragments_m, plan.dot_rows

    assert chosen("M2") == (2, 2)
    assert chosen("M4 Pro") == (1, 2)
    assert chosen("M4 Pro", bits=8, dtype="bfloat16") == (1, 1)
    assert chosen("M5 Max") == (2, 2)
