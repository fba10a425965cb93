"""Tensor operations are checked first, and every launch of a check is compared."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
import mlx_marlin
from mlx_marlin import guard, state
from mlx_marlin.backends import kernels, planner, registry
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import probes as metal_probes
from mlx_marlin.cli import doctor_facts
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.gather_plan import AnyPlan, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import serving, this_machine
from mlx_marlin.products.serving import Place, Refusal, usable
from support.guarded_calls import (
    DEVICE,
    K,
    N,
    assert_compares,
    change_header,
    check_statically,
    collected,
    is_right,
    new_process,
    operands,
)
from support.marks import needs_emulator

pytestmark = needs_emulator
M5_MAX = named("Apple M5 Max")


def plan_of(dtype: str = "float16") -> Plan:
    problem = problem_of(16, 4096, 4096, dtype=dtype)
    return planner.make(problem, device=M5_MAX, kernel="gemm_tensor")


def choose(problem: Problem, _: Any) -> Plan:
    return planner.make(problem, device=M5_MAX, kernel="gemm_tensor")


@pytest.fixture
def _tensor(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `gemm_tensor` serve every call, on an M5."""
    monkeypatch.setattr(planner, "choose", choose)
    monkeypatch.setattr(this_machine, "device", lambda: M5_MAX)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_operations_of_an_m5_pass(dtype: str) -> None:
    probes = metal_probes.probes(plan_of(dtype))

    assert [known_answers.fault_of_probe(probe) for probe in probes] == [None] * 3
    assert [dict(probe.launch.template)["T"] for probe in probes] == [dtype] * 3
    for probe in probes:
        check_statically(probe)


@pytest.mark.parametrize("layout", ["g16", "scrambled"])
def test_every_probe_sees_another_layout(layout: str) -> None:
    with metal_emulator.emulated(tensor_layout=layout):
        faults = [
            known_answers.fault_of_probe(probe)
            for probe in metal_probes.probes(plan_of())
        ]

    assert "another layout of w: lane 0" in str(faults[0])
    assert str(faults[1]).startswith("the tensor operation gives ")
    assert str(faults[2]).startswith("the accumulating tensor operation gives ")


def stated(transposed: tuple[int, ...] = ()) -> list[float]:
    """Returns what M5's operands say, those of x transposed in some lanes."""
    found: list[float] = []
    for lane in range(32):
        for name, count in metal_probes.ELEMENTS.items():
            found.append(count)
            for element in range(count):
                row, column = metal_probes.position(name, lane, element)
                swap = name == "x" and lane in transposed
                found += [1, row, column] if swap else [1, column, row]
    return found


def test_indices_of_x_may_be_those_of_the_array_or_of_its_transpose() -> None:
    probe = metal_probes.layout_probe("float16")

    assert probe.fault(stated()) is None
    assert probe.fault(stated((*range(32),))) is None
    assert "another layout of x: lane 31" in str(probe.fault(stated((31,))))


@pytest.mark.parametrize("transposed", [(), (*range(32),)], ids=["x", "its transpose"])
def test_whatever_an_operand_says_of_an_element_is_compared(
    transposed: tuple[int, ...],
) -> None:
    values = stated(transposed)
    probe = metal_probes.layout_probe("float16")
    at = 0
    for lane in range(32):
        for name, count in metal_probes.ELEMENTS.items():
            element = 1 + 3 * (7 * lane % count)
            # The capacity, whether an element is valid, or one of its indices.
            place = at + (0, element, element + 1, element + 2)[lane % 4]
            values[place] += 1
            assert f"layout of {name}" in str(probe.fault(values)) or transposed
            assert probe.fault(values) is not None
            values[place] -= 1
            at += 1 + 3 * count


@pytest.mark.parametrize("add", [False, True])
def test_every_product_of_a_probe_is_compared(add: bool) -> None:
    values = [float(value) for value in metal_probes._products(add)]
    places = (*range(0, len(values), 977), len(values) - 1)
    probe = metal_probes.probes(plan_of())[1 + add]
    assert_compares(probe, values, lambda value: value + 1, places)


@pytest.mark.usefixtures("_tensor")
@pytest.mark.parametrize("m", [16, 24])
def test_the_kernel_serves_after_its_probes(m: int) -> None:
    x, w = operands(m)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert messages == []
    assert is_right(y, x, w)
    kernels = [verdict.kernels for verdict in guard.verdicts_so_far()]
    assert [*map(str, kernels)] == [
        *("marlin_gemm_tensor", "marlin_tensor_layout"),
        *("marlin_tensor_probe", "marlin_tensor_probe"),
    ]


@pytest.mark.usefixtures("_tensor")
def test_one_operation_a_simdgroup_serves_where_two_give_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a compiler spills registers."""
    change_header(monkeypatch, "gemm_tensor", "BLOCKS>1&&", "BLOCKS>2&&")
    x, w = operands(24)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert ["marlin_gemm_tensor failed" in message for message in messages] == [True]
    assert is_right(y, x, w)
    problem = problem_of(24, N, K)
    used = serving.serve_problem(problem, serving.here(guard.known_fault))
    assert isinstance(used, Plan)
    assert (used.kernel, used.fragments_m) == ("gemm_tensor", 2)


@pytest.mark.usefixtures("_tensor")
@pytest.mark.parametrize("m", [16, 24])
def test_another_layout_switches_the_kernel_off_with_one_warning(m: int) -> None:
    x, w = operands(m)
    packed = mlx_marlin.pack(*w)
    with metal_emulator.emulated(tensor_layout="g16"):
        y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
        of_packed, again = collected(lambda: mlx_marlin.quantized_matmul(x, packed))

    assert [message.split(":")[1] for message in messages] == [
        " the kernel marlin_tensor_layout failed its check on this machine"
    ]
    assert again == []
    assert is_right(y, x, w)
    assert is_right(of_packed, x, w)
    verdicts = {verdict.kernels for verdict in guard.verdicts_so_far()}
    assert "marlin_gemm_tensor" not in verdicts
    # The back end is forced, so another kernel of ours serves, not stock MLX.
    assert "marlin_gemm_register" in verdicts
    assert guard.known_fault(plan_of()) is not None
    new_process()
    assert "failed its check" in str(guard.known_fault(plan_of()))


@pytest.mark.usefixtures("_tensor")
def test_a_kernel_that_does_not_compile_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where macOS has no tensor operations after all."""
    change_header(monkeypatch, "tensor_layout", "Primitives.h", "Missing.h")
    x, w = operands(16)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert len(messages) == 1
    assert "marlin_tensor_layout" in messages[0]
    assert is_right(y, x, w)


def test_the_kernel_is_not_built_without_tensor_units() -> None:
    with pytest.raises(ValueError, match=r"M4 Max.*none: expected an M5"):
        planner.make(
            problem_of(16, N, K), device=named("Apple M4 Max"), kernel="gemm_tensor"
        )


def fault(plan: AnyPlan) -> str | None:
    """Returns that tensor operations failed their check."""
    failed = isinstance(plan, Plan) and plan.has_tensor_operations
    return "it failed" if failed else None


@pytest.mark.parametrize("may", [False, True])
def test_stock_mlx_serves_instead_where_it_may_and_is_faster(may: bool) -> None:
    def kernel(n: int, k: int, layout: str) -> str:
        problem = problem_of(16, n, k, layout=layout)
        plan = planner.make(problem, device=M5_MAX, kernel="gemm_tensor")
        used = usable(plan, Place(device=M5_MAX, is_here=not may, fault=fault))
        return used.kernel if isinstance(used, Plan) else str(used)

    assert kernel(14336, 4096, "marlin") == "gemm_register"
    assert kernel(14336, 4096, "mlx") == ("it failed" if may else "gemm_register")


def test_other_kernels_have_no_probe_and_no_alternative() -> None:
    plan = planner.make(problem_of(16, 64, 64), device=M5_MAX, kernel="gemm_register")
    backend = registry.named(plan.backend)
    assert backend.probes(plan) == ()
    assert backend.alternative(plan, M5_MAX) is None
    place = Place(device=M5_MAX, fault=lambda _: "it failed")
    refused = usable(plan, place)
    assert refused == Refusal("it failed", "fault")


@pytest.mark.usefixtures("_tensor")
def test_the_check_of_doctor_and_the_report_know_the_alternative() -> None:
    problem = problem_of(16, N, K)
    with metal_emulator.emulated(tensor_layout="g16"):
        assert doctor_facts.check([problem]) == []
    kernels = {verdict.kernels for verdict in guard.verdicts_so_far()}
    assert "marlin_gemm_register" in kernels
    used = serving.serve_problem(problem, serving.here(guard.known_fault))
    assert isinstance(used, Plan)
    assert used.kernel == "gemm_register"


HEADS = Heads(heads=2, kv_heads=1, features=32, columns=128, norm=1e-6)
PROBLEM = problem_of(9, N, K)


def split_plan(**options: Any) -> Plan:
    split = {"strategy": "split_k", "k_parallel": 2, **options}
    return planner.make(PROBLEM, device=DEVICE, kernel="gemm_register", **split)


def plan_of_experts() -> GatherPlan:
    gather = GatherProblem(problem=replace(PROBLEM, m=8), experts=4, pairs_per_row=2)
    return planner.choose_gather(gather, DEVICE)


PLANS: dict[str, tuple[int, Any]] = {
    # Five plans and a NaN, each with its partial sums.
    "products": (12, split_plan()),
    "decoded weights": (5, dequantize_plan(PROBLEM)),
    "experts": (1, plan_of_experts()),
    "repacked codes": (1, RepackPlan(to="marlin", n=N, k=K, bits=4, group_size=64)),
    "rotated heads": (2, HeadsPlan(HEADS, "float16", 2, 2, True)),
    "added rows": (1, AddNormPlan(1, "float16", 72, 1e-5)),
    "routing": (1, RoutePlan(1, "float16", 20, 3, False, False)),
    "combining": (2, CombinePlan(1, "float16", 40, 3)),
}
"""Launches of a check, and the plan that is checked."""


class OneWrong:
    """Kernels one of whose results is wrong: that of a launch, by its index there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrong: tuple[int, int] | None = None
        self.results: list[int] = []
        patch.setattr(kernels, "_factory", lambda: self._factory)
        state.reset()  # of kernels that were built before

    def _factory(self, **texts: Any) -> Callable[..., list[mx.array]]:
        kernel = metal_emulator.metal_kernel(**texts)

        def launch(**arguments: Any) -> list[mx.array]:
            results: list[mx.array] = kernel(**arguments)
            nth = len(self.results)
            self.results.append(len(results))
            return [
                _changed(each) if (nth, index) == self.wrong else each
                for index, each in enumerate(results)
            ]

        return launch

    def fault(self, plan: Any, wrong: tuple[int, int] | None = None) -> str | None:
        """Checks a plan of which one result is wrong, or none."""
        self.wrong = wrong
        self.results.clear()
        return known_answers.fault_of(plan)


def _changed(y: mx.array) -> mx.array:
    return ~y if y.dtype == mx.uint32 else (y + y).astype(y.dtype)


@pytest.mark.parametrize("name", PLANS)
def test_every_result_of_every_launch_is_compared(
    name: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, plan = PLANS[name]
    faulty = OneWrong(monkeypatch)
    assert faulty.fault(plan) is None
    assert len(faulty.results) == launches

    every = [(nth, j) for nth, count in enumerate(faulty.results) for j in range(count)]
    assert [each for each in every if faulty.fault(plan, each) is None] == []


@pytest.mark.parametrize("wrong", range(3))
def test_a_kernel_needs_all_of_its_probes(
    wrong: int, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = named("Apple M5 Max")
    problem = problem_of(16, 4096, 4096)
    plan = planner.make(problem, device=device, kernel="gemm_tensor")
    probes = metal_probes.probes(plan)
    assert len(probes) == 3
    faults = [lambda _: None] * 3
    faults[wrong] = lambda _: "planted"
    changed = [
        replace(probe, fault=fault) for probe, fault in zip(probes, faults, strict=True)
    ]
    monkeypatch.setattr(metal_probes, "probes", lambda _: changed)

    with pytest.warns(RuntimeWarning, match="planted"):
        reason = guard.why_not(plan)

    assert "planted" in str(reason)
    assert guard.known_fault(plan) == reason
