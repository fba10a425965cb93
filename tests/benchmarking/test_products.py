"""What `bench` times of a product: arms, layouts, clocks and their checks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin import guard
from mlx_marlin.backends import devices, graph, planner, registry, selection
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.measure import clocks, operands, products, timing
from mlx_marlin.measure.products import Measured
from mlx_marlin.measure.rows import CLOCKS, DEQUANTIZED, OURS, STOCK
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import packing, serving, this_machine
from mlx_marlin.products.serving import Refusal
from support.choose import Choose
from support.marks import needs_emulator
from support.profiles import sampled
from support.timed_products import M3_MAX, SMALL, exact_product_of

pytestmark = needs_emulator


@pytest.fixture
def measure(backend: Choose) -> Callable[..., Measured]:
    """Measures in the emulator."""
    backend("emulator")
    clock = clocks.clock_of(DEFAULT)

    def measured(problem: Problem = SMALL, *layouts: str, **options: bool) -> Measured:
        return products.measure(problem, DEFAULT, clock, layouts or ("mlx",), **options)

    return measured


@pytest.fixture
def on_metal(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> clocks.Clock:
    """Pretends that there is a GPU, where stock MLX's product stands in for ours."""
    backend("metal")
    monkeypatch.setattr(selection, "missing", lambda: None)
    monkeypatch.setattr(devices, "current", lambda *_: M3_MAX)
    monkeypatch.setattr(operands, "MOST_WEIGHTS", 4)
    monkeypatch.setattr(timing, "LONGEST", 4)
    monkeypatch.setattr(
        graph, "product", lambda plan: operands.stock_product(plan.problem)
    )
    return clocks.clock_of(M3_MAX, seconds=0.001)


def test_in_the_emulator_every_time_is_the_cost_models(
    measure: Callable[..., Measured],
) -> None:
    measured = measure(SMALL, "mlx", "marlin")

    assert (measured.faults, measured.notes) == ([], [])
    found = {(row.arm, row.problem.layout, row.clock): row for row in measured.rows}
    arms = [(OURS, "mlx"), (OURS, "marlin")]
    assert {*found} == {(*arm, clock) for arm in arms for clock in CLOCKS}
    assert len(found) == len(measured.rows)
    for (_, layout, _), row in found.items():
        assert row.timing.source == "predicted"
        assert row.problem == replace(SMALL, layout=layout)
        assert row.timing.method == "cost model"
        assert row.plan == planner.choose(row.problem, DEFAULT)


@sampled(1)
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_formats_of_floats_are_compared_too(
    measure: Callable[..., Measured], mode: str
) -> None:
    measured = measure(problem_of(4, 64, 256, mode=mode), "marlin")

    assert (measured.faults, measured.notes) == ([], [])
    assert {row.arm for row in measured.rows} == {OURS}


def instant(products: Any, drifts: Any) -> dict[Any, timing.Spread]:
    """Measures nothing."""
    given = drifts if isinstance(drifts, tuple) else [0.0] * len(products)
    pairs = zip(products, given, strict=True)
    return {key: timing.Spread(median=1.0, drift=drift) for key, drift in pairs}


@pytest.mark.parametrize("chip", ["Apple M3 Max", "Apple M5 Max"])
def test_stagings_are_compared_with_gemm_register(
    chip: str, on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(8, 256, 512)
    exact = exact_product_of(problem)
    monkeypatch.setattr(graph, "product", lambda _: lambda *_: exact)
    clock = replace(on_metal, measure=instant, measure_independent=instant)
    measured = products.measure(
        problem, devices.named(chip), clock, ("mlx",), staged=True
    )

    arms = {row.arm: row.plan for row in measured.rows if row.arm.startswith("gemm")}
    assert measured.faults == []
    tensor = {"gemm_tensor": ("gemm_tensor", 0, 0)} if "M5" in chip else {}
    assert {
        name: (plan.kernel, plan.buffers, plan.loaders)
        for name, plan in arms.items()
        if plan
    } == tensor | {
        "gemm_register": ("gemm_register", 0, 0),
        "gemm_staged, 1 buffer": ("gemm_staged", 1, 0),
        "gemm_staged, 2 buffers": ("gemm_staged", 2, 0),
        "gemm_staged, 3 buffers": ("gemm_staged", 3, 0),
        "gemm_staged, 2 buffers, 1 loader": ("gemm_staged", 2, 1),
    }


def test_every_arm_reads_the_weights_of_its_layout(
    on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, set[int]] = {"mlx": set(), "marlin": set()}

    def product(plan: Any) -> graph.Product:
        layout = plan.problem.layout
        asked = operands.operands(replace(SMALL, layout=layout), 4).weights
        shapes = [[each.shape for each in weight] for weight in asked]

        def serve(x: mx.array, *weight: mx.array) -> mx.array:
            nth = [mx.array_equal(weight[0], each[0]) for each in asked].index(True)
            assert [each.shape for each in weight] == shapes[nth]
            assert mx.array_equal(weight[1], asked[nth][1])
            given[layout].add(nth)
            return exact_product_of(SMALL)

        return serve

    monkeypatch.setattr(graph, "product", product)
    monkeypatch.setattr(packing, "_on_gpu", lambda: False)
    measured = products.measure(SMALL, M3_MAX, on_metal, ("marlin", "mlx"))

    assert measured.faults == []
    assert given == {"mlx": {0, 1, 2, 3}, "marlin": {0, 1, 2, 3}}
    arms = [(row.arm, row.problem.layout) for row in measured.rows[:4]]
    assert arms == [
        *((OURS, "marlin"), (OURS, "mlx"), (STOCK, "mlx"), (DEQUANTIZED, "mlx"))
    ]


def test_on_a_gpu_every_arm_is_measured_on_all_weights(
    on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Counter[int]()
    stock = operands.stock_product

    def counted(problem: Problem) -> graph.Product:
        def product(x: mx.array, w: mx.array, *rest: mx.array) -> mx.array:
            used[id(w)] += 1
            return stock(problem)(x, w, *rest)

        return product

    monkeypatch.setattr(operands, "stock_product", counted)
    measured = products.measure(SMALL, M3_MAX, on_metal, ("mlx",))

    assert len(measured.rows) == 3 * 2
    for row in measured.rows:
        assert row.timing.source == "measured"
        assert row.timing.seconds > 0
        assert row.timing.samples >= timing.ROUNDS
    # Both of ours and `mx.quantized_matmul` go through `counted`.
    assert len(used) == operands.weight_count(SMALL, M3_MAX) > 2


def test_a_wrong_product_is_left_out_with_a_note(
    measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = graph.product
    monkeypatch.setattr(
        graph, "product", lambda plan: lambda *given: right(plan)(*given) + 1
    )

    measured = measure()

    assert not measured.rows
    (fault,) = measured.faults
    assert "ours (mlx layout)" in fault
    assert "is left out: its product is wrong" in fault


def test_a_kernel_that_fails_its_check_is_left_out(
    measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "why_not", lambda plan: "it does not compile")

    measured = measure()

    assert not measured.rows
    assert "is left out: it does not compile" in measured.faults[0]


def test_a_call_that_stock_would_serve_is_timed_with_our_best_plan(
    measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal("stock MLX is faster", "speed")
    monkeypatch.setattr(serving, "serve_problem", lambda *_, **__: refusal)

    ours = [row for row in measure().rows if row.arm == OURS]

    assert {row.handover for row in ours} == {"stock MLX is faster"}
    assert {row.plan for row in ours} == {planner.choose(SMALL, DEFAULT)}


def test_a_weight_that_is_decoded_once_is_timed_that_way(
    on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def product(plan: DequantizePlan) -> graph.Product:
        decoded.append(plan)
        return operands.stock_product(plan.problem)

    monkeypatch.setattr(graph, "dequantized_product", product)
    monkeypatch.setattr(
        serving, "serve_problem", lambda problem, *_, **__: dequantize_plan(problem)
    )

    measured = products.measure(SMALL, M3_MAX, on_metal, ("mlx",))

    ours = [row for row in measured.rows if row.arm == OURS]
    assert not measured.faults
    assert {row.plan for row in ours} == {None}
    assert decoded == [dequantize_plan(SMALL)]


def test_drift_is_noted(
    on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of more than a twentieth, up or down."""
    chain, independent = (
        lambda products, _, drifts=drifts: instant(products, drifts)
        for drifts in ((0.2, 0.05, -0.06), (-0.05, 0.0, 0.0501))
    )
    clock = replace(on_metal, measure=chain, measure_independent=independent)
    notes = products.measure(SMALL, M3_MAX, clock, ("mlx",)).notes

    assert [note.split(": the chip")[0] for note in notes] == [
        f"{arm} drifted by {drift} during the measurement of {SMALL.explain()} ({how})"
        for arm, drift, how in (
            (OURS, "+20%", "chain"),
            (DEQUANTIZED, "-6%", "chain"),
            (DEQUANTIZED, "+5%", "independent"),
        )
    ]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (problem_of(4, 64, 256, mode="symmetric", layout="marlin"), "'symmetric'"),
        (problem_of(4, 64, 256, group_size=256, layout="marlin"), "group_size=256"),
    ],
)
def test_what_stock_does_not_have_is_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        products.check(problem)


def test_what_our_kernels_do_not_support_is_refused(
    on_metal: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    backend = registry.of_device(M3_MAX)
    monkeypatch.setattr(
        backend, "unsupported", lambda *given: asked.append(given) or told
    )
    told = None
    products.check(SMALL)
    told = "no kernel has it"
    with pytest.raises(ValueError, match="no kernel has it"):
        products.check(SMALL)
    assert asked == [(SMALL, this_machine.device())] * 2
