"""Biases and gates of experts' products on Metal, against float64."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import devices, planner, selection
from mlx_marlin.backends.metal.experts import MetalGatherPlan, gather_unsupported
from mlx_marlin.guard import experts
from mlx_marlin.planning.gather_plan import GATES, GatherProblem
from mlx_marlin.planning.problem import Problem
from support import strategies
from support.expert_products import ExpertProducts
from support.oracles import exact
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only, needs_kernels

pytestmark = needs_kernels
M3 = devices.named("Apple M3 Max")
UNEVEN = (3, 0, 3, 3, 5, 0, *([3] * 9), 1)
"""More pairs of an expert than a tile of 8 rows has, of others none or one."""


FINISHED = [(None, True), *product(GATES, (False, True))]
"""Gates and biases; test_gather_qmm has products without."""


def problem_of(n: int = 41, **options: object) -> Problem:
    fields = {"m": len(UNEVEN), "n": n, "k": 320, "layout": "marlin", **options}
    return Problem(**fields)


def plan_of(problem: Problem, gate: str | None, bias: bool) -> MetalGatherPlan:
    gather = GatherProblem(problem=problem, experts=6, gate=gate, bias=bias)
    plan = planner.choose_gather(gather, M3)
    assert isinstance(plan, MetalGatherPlan)
    return plan


@st.composite
def products(draw: st.DrawFn) -> ExpertProducts:
    """Draws products of any format, with or without a gate and biases, and any plan."""
    problem = draw(
        strategies.problems(
            max_m=40, max_n=70, max_k=512, formats=strategies.ANY_FORMAT
        )
    )
    gates = st.sampled_from((None, *GATES))
    gate = draw(gates) if problem.layout == "marlin" else None
    bias = draw(st.booleans())
    count = draw(st.integers(1, 5))
    divisors = [0, *(each for each in range(1, 9) if problem.m % each == 0)]
    gather = GatherProblem(
        problem=problem,
        experts=count,
        pairs_per_row=draw(st.sampled_from(divisors)),
        gate=gate,
        bias=bias,
    )
    simdgroups_m = draw(st.integers(1, 4))
    most = 8 // simdgroups_m // gather.weights
    plan = MetalGatherPlan(
        gather=gather,
        fragments_m=draw(st.integers(1, 2)),
        simdgroups_m=simdgroups_m,
        simdgroups_k=gather.weights * draw(st.integers(1, min(most, 2))),
        dot_rows=draw(st.integers(0, 2)),
        operand=draw(strategies.operands(problem, "gemm_register")),
    )
    chosen = st.lists(st.integers(0, count - 1), min_size=problem.m)
    return ExpertProducts(
        plan=plan,
        chosen=tuple(draw(chosen)[: problem.m]),
        seed=draw(st.integers(0, 2**16)),
    )


@drawn(3, case=products())
def test_every_plan_computes_its_products(case: ExpertProducts) -> None:
    assert case.wrong_result() is None


@sampled(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("gate", "bias"), FINISHED)
def test_the_chosen_plan(gate: str | None, bias: bool, dtype: str) -> None:
    problem = problem_of(dtype=dtype, scale_dtype=dtype)
    case = ExpertProducts(plan=plan_of(problem, gate, bias), chosen=UNEVEN, seed=5)

    assert case.wrong_result() is None

    if selection.backend() == "emulator":
        arrays = case.arrays()
        with metal_emulator.emulated(trace=True):
            traced = case.run(*arrays)
        assert mx.array_equal(traced, case.run(*arrays))


@sampled(1)
@emulator_only
@pytest.mark.parametrize("gate", GATES)
def test_both_weights_are_read_once_for_all_rows_of_an_expert(gate: str) -> None:
    plan = plan_of(problem_of(64), gate, bias=True)
    case = ExpertProducts(plan=plan, chosen=(4, 1, 4, 1, 4, 2, 1, *([4] * 9)))

    counters = metal_emulator.trace(case.run, *case.arrays())[0]

    for name in ("w", "second"):
        own = counters.of(name)
        # Twelve pairs of an expert are two tiles of eight rows.
        tiles = 4 if plan.rows == 8 else 3
        assert own.read_bytes == tiles * plan.problem.code_bytes


@pytest.mark.parametrize(
    "operand",
    [("x", 0), *(((name, i)) for name in ("scales", "biases") for i in (0, 1))],
)
@pytest.mark.parametrize("gate", GATES)
def test_a_nan_in_one_operand_is_in_its_results(
    gate: str, operand: tuple[str, int]
) -> None:
    """A gate that is clipped keeps those of both its operands."""
    plan = plan_of(problem_of(64, dtype="float32"), gate, bias=True)
    case = ExpertProducts(plan=plan, chosen=UNEVEN, not_a_number=operand)

    assert case.wrong_result() is None

    wrong = np.isnan(exact(case.run(*case.arrays())))
    pairs = [2] if operand[0] == "x" else np.flatnonzero(np.equal(UNEVEN, UNEVEN[2]))
    assert np.array_equal(wrong.any(axis=1).nonzero()[0], pairs)
    assert wrong.sum() == len(pairs) * (64 if operand[0] == "x" else 1)


@pytest.mark.parametrize(
    ("options", "gate", "words"),
    [
        ({"layout": "mlx"}, "silu", "gates packed weights"),
        ({"invariant": True}, "silu", "not invariant"),
        ({"layout": "mlx"}, None, None),
        ({"invariant": True}, None, None),
        ({}, "silu", None),
    ],
)
def test_what_the_kernel_does_not_compute_is_told(
    options: dict[str, object], gate: str | None, words: str | None
) -> None:
    gather = GatherProblem(
        problem=problem_of(**options), experts=6, gate=gate, bias=True
    )
    reason = gather_unsupported(gather)
    assert words in str(reason) if words else reason is None


def test_a_gate_needs_an_even_number_of_simdgroups() -> None:
    plan = plan_of(problem_of(), "silu", bias=False)
    with pytest.raises(ValueError, match=r"simdgroups_k=3 is odd, expected an even"):
        replace(plan, simdgroups_k=3)
    assert ", gated by silu" in plan.explain()


@sampled(1, 3)
@pytest.mark.parametrize(("gate", "bias"), FINISHED)
def test_known_answers_find_a_wrong_second_weight(gate: str | None, bias: bool) -> None:
    plan = plan_of(problem_of(64), gate, bias)
    assert experts.fault_of(plan) is None
