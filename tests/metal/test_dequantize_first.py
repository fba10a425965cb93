"""Plans that decode a weight once for a plain product: right, bounded, chosen."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import build, devices, graph, planner
from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.cost import LEAST_ROWS, dequantize_seconds
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import packing
from support import drawn_arrays, format_cases, launches, oracles, strategies
from support.choose import Choose
from support.format_cases import Weight
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only


@st.composite
def dequantize_plans(draw: st.DrawFn) -> DequantizePlan:
    """Draws plans of any format, both ways, in one chunk or several."""
    problem = draw(
        strategies.problems(
            max_m=20, max_n=100, max_k=256, formats=strategies.ANY_FORMAT
        )
    )
    transposed = draw(st.booleans())
    side = 32 if transposed else 64
    chunk = side * draw(st.integers(1, 4))
    return DequantizePlan(problem=problem, transposed=transposed, chunk=chunk)


def operands(plan: DequantizePlan, *, seed: int) -> tuple[mx.array, Weight]:
    """Makes activations and a weight for a plan."""
    problem = plan.problem
    inner = problem.k if plan.transposed else problem.n
    x = format_cases.activations(problem.m, inner, dtype=problem.dtype, seed=seed)
    return x, drawn_arrays.weight_of(problem, seed=seed + 1)


def assert_close(y: mx.array, x: mx.array, weight: Weight, transposed: bool) -> None:
    """Each element is within rounding of the weight, of the sum and of the result."""
    name = str(y.dtype).removeprefix("mlx.core.")
    scale, value, bias = map(np.abs, weight.parts)
    matrix, magnitudes = weight.decoded, scale * value + bias
    if transposed:
        matrix, magnitudes = matrix.T, magnitudes.T
    expected = oracles.exact(x) @ matrix
    terms = np.abs(oracles.exact(x)) @ magnitudes
    off = np.abs(oracles.exact(y) - expected)
    assert y.shape == expected.shape
    # MLX adds as it likes: in float32, small floats of all sizes lose some bits more.
    units = 4 * oracles.ROUNDING[name] + 32 * 2.0**-24
    assert np.all(off <= units * terms + oracles.SMALLEST[name])


@emulator_only
@drawn(6, plan=dequantize_plans(), seed=st.integers(0, 2**16))
def test_a_weight_is_decoded_once_and_its_product_is_right(
    plan: DequantizePlan, seed: int
) -> None:
    x, weight = operands(plan, seed=seed)
    build = format_cases.arguments(weight, plan.problem.layout)

    y = graph.dequantized_product(plan)(x, *build)
    decoded = oracles.exact(launches.dequantized(plan)(*build))

    assert y.dtype == x.dtype
    assert_close(y, x, weight, plan.transposed)
    scale, value, bias = map(np.abs, weight.parts)
    # A sum of two in float32, of which a zero point's is itself a product.
    sums = 2.0**-23 * (scale * value + bias)
    rounding = oracles.ROUNDING[plan.problem.dtype] * np.abs(weight.decoded)
    off = np.abs(decoded - weight.decoded)
    assert np.all(off <= sums + rounding + oracles.SMALLEST[plan.problem.dtype])


def blanks(plan: DequantizePlan) -> list[mx.array]:
    """Makes a product's arguments, never evaluated."""
    x, weight = operands(plan, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_on_gpu", lambda: False)  # there is no Metal here
        return [x, *format_cases.arguments(weight, plan.problem.layout)]


@pytest.mark.usefixtures("metal")
@given(plan=dequantize_plans())
@settings(max_examples=40)
def test_mlx_records_one_decoding_for_each_chunk(plan: DequantizePlan) -> None:
    calls: list[Any] = []

    def collect(record: dict[str, Any]) -> None:
        if record.get("name") == "CustomKernel":
            calls.append(record)

    mx.export_function(collect, graph.dequantized_product(plan), *blanks(plan))

    problem = plan.problem
    shapes = [call["outputs"][0][1] for call in calls]
    assert shapes == [(rows, length) for _, rows, _, length in plan.chunks]
    assert {call["outputs"][0][2] for call in calls} == {getattr(mx, problem.dtype)}
    step = 32 if problem.group_size == 32 else 64
    for call, (_, rows, _, length) in zip(calls, plan.chunks, strict=True):
        threads = 32 * -(-rows // 32) * length // step
        grid, threadgroup = call["arguments"][2:5], call["arguments"][5:8]
        assert [*grid] == [threads, 1, 1]
        assert [*threadgroup] == [min(threads, 128), 1, 1]
        values = map(int, build.weight_template(problem).values())
        assert ", ".join(map(str, values)) in call["arguments"][1]


@emulator_only
def test_the_memory_for_decoded_weights_is_bounded(
    monkeypatch: pytest.MonkeyPatch, kernels: None
) -> None:
    most = 48 * 64 * 2
    monkeypatch.setitem(dequantize_plan.__globals__, "MOST_TEMPORARY", most)
    made: list[DequantizePlan] = []
    original = graph.dequantized_product

    def recording(plan: DequantizePlan) -> graph.Product:
        made.append(plan)
        return original(plan)

    monkeypatch.setattr(graph, "dequantized_product", recording)
    weight = format_cases.any_weight("affine", 3, 64, 48, 192, dtype="float16", seed=1)
    x = format_cases.activations(5, 48, dtype="float16", seed=2)
    packed = mlx_marlin.pack(*weight.native, **weight.options)

    y = mlx_marlin.quantized_matmul(x, packed, transpose=False)

    assert [len(each.chunks) for each in made] == [3]
    assert made[0].temporary_bytes == most
    assert_close(y, x, weight, transposed=False)


def asked(layout: str, m: int, n: int, k: int, **more: Any) -> Problem:
    return Problem(m=m, n=n, k=k, layout=layout, **more)


@pytest.mark.parametrize(
    ("chip", "layout", "m", "expected"),
    [
        ("M3 Max", "marlin", 64, False),
        ("M3 Max", "marlin", 2048, True),
        ("M3 Max", "mlx", 2048, False),
        ("M5", "marlin", 64, False),
        ("M5", "marlin", 256, True),
        ("M5", "mlx", 128, False),
        ("M5", "mlx", 2048, True),
    ],
)
def test_matrix_units_and_many_rows_decide(
    chip: str, layout: str, m: int, expected: bool
) -> None:
    problem = asked(layout, m, 4096, 4096)

    assert bool(planner.choose_dequantize(problem, Device.named(chip))) == expected


def test_decoding_and_multiplying_are_two_levels_of_a_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, chip = Problem(m=512, n=4096, k=4096), Device.named("M3 Max")
    monkeypatch.setattr(cost, "level_seconds", lambda _: 0.0)
    without = dequantize_seconds(problem, chip)
    monkeypatch.setattr(cost, "level_seconds", lambda _: 1.0)

    assert dequantize_seconds(problem, chip) - without == pytest.approx(2.0)


@given(
    problem=strategies.problems(
        max_m=3000, max_n=20_000, max_k=20_000, formats=strategies.ANY_FORMAT
    ),
    chip=strategies.devices(),
)
def test_what_it_cannot_do_it_is_not_chosen_for(problem: Problem, chip: Device) -> None:
    fused = replace(problem, epilogue=Epilogue(bias=True))

    assert planner.choose_dequantize(fused, chip) is None
    assert planner.choose_dequantize(replace(problem, invariant=True), chip) is None
    few = replace(problem, m=min(problem.m, LEAST_ROWS - 1))
    assert planner.choose_dequantize(few, chip) is None
    assert dequantize_seconds(problem, chip) > problem.bytes / (
        chip.bandwidth_gbs * 1e9
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[DequantizePlan]:
    """Lists the plans that are built for decoded weights."""
    plans: list[DequantizePlan] = []

    def product(plan: DequantizePlan) -> graph.Product:
        plans.append(plan)
        return lambda x, *_: mx.zeros((x.shape[0], plan.columns), x.dtype)

    monkeypatch.setattr(graph, "dequantized_product", product)
    return plans


def pretend_a_mac(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    backend(None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(devices, "current", lambda *_: Device.named("M5"))


def large(rows: int) -> tuple[mx.array, tuple[mx.array, ...]]:
    x = mx.zeros((rows, 4096), mx.float16)
    w, factors = mx.zeros((4096, 512), mx.uint32), mx.zeros((4096, 64), mx.float16)
    return x, (w, factors, factors)


@pytest.mark.parametrize(
    ("name", "rows"), [(None, 16), (None, 2048), ("metal", 2048), ("emulator", 2048)]
)
def test_on_a_mac_many_rows_are_multiplied_by_decoded_weights(
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    decoded: list[DequantizePlan],
    name: str | None,
    rows: int,
) -> None:
    pretend_a_mac(backend, monkeypatch)
    backend(name)
    x, native = large(rows)

    assert mlx_marlin.why_not(x, *native) is None

    # Rows enough, or none; who forces a back end sees our kernels run.
    is_decoded = rows == 2048 and name is None
    assert [each.problem.m for each in decoded] == [2048] * is_decoded
    assert all(each.transposed for each in decoded)
    assert [each.problem.m for each in graph.plans_built()] == (
        [] if is_decoded else [rows]
    )


@pytest.mark.parametrize("transpose", [True, False])
def test_a_packed_weight_goes_both_ways_without_stock(
    backend: Choose, decoded: list[DequantizePlan], transpose: bool
) -> None:
    backend("emulator")
    weight = format_cases.any_weight("affine", 4, 64, 48, 128, dtype="float16", seed=1)
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = mx.zeros((3, 128 if transpose else 48), mx.float16)

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is None

    if transpose:  # it is the gradient of x
        mx.grad(lambda x: mlx_marlin.quantized_matmul(x, packed).sum())(x)
    assert [each.transposed for each in decoded] == [False]
    assert [each.problem.layout for each in graph.plans_built()] == (
        ["marlin"] * transpose
    )


MLX_FORMATS = [
    ("affine", 4, 64),
    ("affine", 3, 32),
    ("affine", 8, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


@sampled(2)
@emulator_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("mode", "bits", "group_size"), MLX_FORMATS)
def test_products_and_gradients_both_ways_are_stocks(
    mode: str, bits: int, group_size: int, transpose: bool
) -> None:
    weight = format_cases.any_weight(
        mode, bits, group_size, 48, 128, dtype="float32", seed=3
    )
    options: dict[str, Any] = {**weight.options}
    packed = mlx_marlin.pack(*weight.native, **options)
    x = format_cases.activations(6, 128 if transpose else 48, dtype="float32", seed=4)
    x = x.reshape(2, 3, -1)

    def ours(x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    def stock(x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, *weight.native, transpose=transpose, **options)

    expected = stock(x)
    assert mlx_marlin.why_not(x, packed, transpose=transpose) is None
    assert_near(ours(x), expected)
    cotangent = mx.random.normal(expected.shape, key=mx.random.key(5))
    _, (gradient,) = mx.vjp(ours, [x], [cotangent])
    _, (wanted,) = mx.vjp(stock, [x], [cotangent])
    assert_near(gradient, wanted)


def assert_near(actual: mx.array, expected: mx.array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert oracles.error(actual, oracles.exact(expected)) < 2e-6


@sampled(1)
@emulator_only
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
@pytest.mark.parametrize("bits", [2, 5])
def test_what_mlx_has_no_scheme_for_goes_both_ways_too(mode: str, bits: int) -> None:
    weight = format_cases.any_weight(mode, bits, 32, 40, 96, dtype="float32", seed=6)
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = format_cases.activations(4, 40, dtype="float32", seed=7)

    y = mlx_marlin.quantized_matmul(x, packed, transpose=False)

    assert_close(y, x, weight, transposed=False)
    cotangent = format_cases.activations(4, 40, dtype="float32", seed=8)
    rows = mx.zeros((4, 96))
    _, (gradient,) = mx.vjp(
        lambda x: mlx_marlin.quantized_matmul(x, packed), [rows], [cotangent]
    )
    assert_close(gradient, cotangent, weight, transposed=False)
