"""Products of bfloats, and of halves by floats, are checked before plans have them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import probes
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.gather_plan import AnyPlan, GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import this_machine
from mlx_marlin.products.serving import Place, Refusal, usable
from support import oracles
from support.guarded_calls import (
    assert_compares,
    change_header,
    check_statically,
    collected,
)
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = needs_emulator
M1, M4_PRO = named("Apple M1 Max"), named("Apple M4 Pro")
FORMS: tuple[CodeForm, ...] = ("bfloat", "half_by_float")
BITS = {"bfloat": 4, "half_by_float": 8}
forms = pytest.mark.parametrize("operand", FORMS)

FAULTS: dict[str, tuple[tuple[str, str], Sequence[CodeForm]]] = {
    "bfloats are truncated": (("bits);", "ushort(bits & 0xFFFEu));"), ["bfloat"]),
    "bfloats pass through halves": (
        (
            "return as_type<bfloat>(bits);",
            "return bfloat(float(half(as_type<float>(uint(bits) << 16))));",
        ),
        ["bfloat"],
    ),
    "floats pass through halves": (
        (
            "return as_type<float>(uint(bits) << 16);",
            "return float(half(as_type<float>(uint(bits) << 16)));",
        ),
        ["half_by_float"],
    ),
    "halves pass through bfloats": (
        ("(0x5C01 + 2 * (8 * n + k))", "(0x5C00 + 8 * ((8 * n + k) / 4))"),
        ["half_by_float"],
    ),
    "products are rounded to half": (
        (
            "= products.thread_elements()[i];",
            "= float(half(products.thread_elements()[i]));",
        ),
        FORMS,
    ),
    "small bfloats are flushed": (
        ("(27 + 25 * k) << 7", "(k == 0 ? 0 : 27 + 25 * k) << 7"),
        FORMS,
    ),
    "a lane's elements change places": (
        (
            "make_fragment<F>(values[0], values[1])",
            "make_fragment<F>(values[1], values[0])",
        ),
        FORMS,
    ),
    "lanes have the codes of the transpose": (
        (
            "probe_code(V(), lane.row, first + i)",
            "probe_code(V(), first + i, lane.row)",
        ),
        FORMS,
    ),
}
"""What a GPU might do, as a change of the probe's text, and the forms that have it."""


def planted(fault: str, patch: pytest.MonkeyPatch) -> None:
    old, new = map(metal_source.stripped, FAULTS[fault][0])
    change_header(patch, "operand_probe", old, new)


def plan_of(operand: CodeForm, m: int = 16, device: Device = M4_PRO) -> MetalPlan:
    problem = problem_of(m, 4096, 4096, bits=BITS[operand], dtype="bfloat16")
    plan = planner.make(problem, device=device, kernel="gemm_register")
    assert isinstance(plan, MetalPlan)
    return plan


@forms
def test_the_products_of_a_form_are_known(operand: CodeForm) -> None:
    assert known_answers.fault_of_probe(probes.probe(operand)) is None


@forms
@pytest.mark.parametrize("fault", FAULTS)
@sampled(4)
def test_a_gpu_that_computes_otherwise_is_noticed(
    fault: str, operand: CodeForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(fault, monkeypatch)

    said = known_answers.fault_of_probe(probes.probe(operand))
    assert (said is not None) == (operand in FAULTS[fault][1])


@forms
def test_the_probe_passes_the_static_check(operand: CodeForm) -> None:
    check_statically(probes.probe(operand))


@forms
def test_every_product_is_compared(operand: CodeForm) -> None:
    values = [*probes.products(operand)]
    assert len({*values}) == len(values) == 512

    def below(value: float) -> float:
        return float(np.nextafter(np.float32(value), 0))

    assert_compares(probes.probe(operand), values, below, range(512))


def test_plans_have_the_forms_that_a_chip_computes() -> None:
    assert plan_of("bfloat").operand == "bfloat"
    assert plan_of("bfloat", device=M1).operand == "exact"
    assert plan_of("half_by_float").operand == "half_by_float"
    assert plan_of("half_by_float", device=M1).operand == "half_by_float"


@forms
def test_only_plans_of_a_form_are_probed(operand: CodeForm) -> None:
    plan = plan_of(operand)
    backend = registry.named(plan.backend)
    exact = backend.alternative(plan, M4_PRO)
    assert isinstance(exact, MetalPlan)

    assert len(backend.probes(plan)) == 1
    assert (exact.kernel, exact.operand) == ("gemm_register", "exact")
    assert backend.probes(exact) == ()
    assert backend.alternative(exact, M4_PRO) is None


@forms
def test_experts_have_the_exact_form_instead(operand: CodeForm) -> None:
    problem = Problem(
        m=64,
        n=128,
        k=256,
        bits=BITS[operand],
        dtype="bfloat16",
        scale_dtype="bfloat16",
        layout="marlin",
    )
    plan = planner.choose_gather(GatherProblem(problem=problem, experts=4), M4_PRO)

    def fault(plan: AnyPlan) -> str | None:
        return "it failed" if getattr(plan, "operand", None) == operand else None

    used = usable(plan, Place(device=M4_PRO, is_here=False, fault=fault))
    assert isinstance(used, MetalGatherPlan)
    assert used.operand == "exact"
    nowhere = Place(device=M4_PRO, is_here=False, fault=lambda _: "it failed")
    refused = usable(plan, nowhere)
    assert refused == Refusal("it failed", "fault")


@pytest.fixture
def _m4(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `gemm_register` serve every call, on an M4 Pro."""

    def choose(problem: Problem, _: Any) -> Any:
        return planner.make(problem, device=M4_PRO, kernel="gemm_register")

    monkeypatch.setattr(planner, "choose", choose)
    monkeypatch.setattr(this_machine, "device", lambda: M4_PRO)


@sampled(2)
@pytest.mark.usefixtures("_m4")
@pytest.mark.parametrize("works", [True, False])
@forms
def test_the_exact_form_serves_where_the_probe_fails(
    operand: CodeForm, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not works:
        planted("products are rounded to half", monkeypatch)
    draw = np.random.default_rng(1)
    x = mx.array(draw.standard_normal((11, 256), np.float32)).astype(mx.bfloat16)
    w = mx.array(draw.standard_normal((70, 256), np.float32)).astype(mx.bfloat16)
    bits = BITS[operand]
    quantized = mx.quantize(w, group_size=64, bits=bits)

    y, messages = collected(
        lambda: mlx_marlin.quantized_matmul(x, *quantized, group_size=64, bits=bits)
    )

    decoded = mx.dequantize(*quantized, group_size=64, bits=bits)
    expected = oracles.exact(x) @ oracles.exact(decoded).T
    assert oracles.error(y, expected) < oracles.TOLERANCES["bfloat16"]
    failed = ["marlin_operand_probe failed" in message for message in messages]
    assert failed == ([] if works else [True])
    states = {each.kernels: each.state for each in guard.verdicts_so_far()}
    assert states["marlin_operand_probe"] == ("passed" if works else "failed")
    assert states["marlin_gemm_register"] == "passed"
