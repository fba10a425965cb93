"""Gate and up as one product whose epilogue multiplies them; layers on Metal too."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import graph, measured_results, planner, result_files
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.measurement import Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import dispatch
from mlx_marlin.products.request import packed_request
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import GATED, GATED_N, GATED_WAYS, Case
from support.cuda_on_cpu import check
from support.gate_and_up import layer_of
from support.oracles import exact
from support.profiles import sampled

H200 = cuda_cases.h200()
FORMATS = (
    ("affine", 4, 64, "marlin"),
    ("affine", 3, 32, "marlin"),
    ("symmetric", 4, 128, "marlin"),
    ("nvfp4", 4, 16, "marlin"),
    ("affine", 8, 64, "mlx"),
)


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("m", "way"), GATED_WAYS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_integers_are_exact(m: int, way: dict[str, Any], dtype: str) -> None:
    weight, x, expected = cuda_cases.integers(dtype, m, way, GATED_N, gated=True)
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    plan = cuda_on_cpu.plan_of(case, epilogue=Epilogue(gated=True), n=GATED_N)

    y = cuda_on_cpu.run(plan, x, weight)

    assert y.shape == (m, GATED_N // 2)
    assert np.array_equal(exact(y), expected)


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_approx"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_formats_and_activations(
    format: tuple[str, int, int, str], activation: str
) -> None:
    epilogue = replace(GATED, activation=activation)
    check((*format, "float16", *GATED_WAYS[0]), epilogue=epilogue, n=GATED_N)


@sampled(5)
@pytest.mark.parametrize("rows", [(), (1,), (2, 9), (3, 50), (0,)], ids=str)
@pytest.mark.parametrize("layout", ["marlin", "mlx"])
@pytest.mark.parametrize("served", ["on_cpu", "kernels"])
def test_a_layer_gates_half_of_it(
    served: str, layout: str, rows: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(served)
    layer, x = layer_of(layout), mx.random.normal((*rows, 128)).astype(mx.float16)

    y = layer.gated(x)

    native = layer_of("mlx").native()  # the same weight, as MLX quantizes it
    product = oracles.product(x, *native, group_size=64)
    expected = epilogues.finished(product, (), GATED)
    assert (y.shape, y.dtype) == ((*rows, 96), mx.float16)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    gated = [plan.problem.epilogue.gated for plan in graph.plans_built()]
    kernels = {"on_cpu": ["marlin"], "kernels": ["marlin", "mlx"]}[served]
    assert any(gated) == (layout in kernels and 0 not in rows)


@sampled(3, 7)
@pytest.mark.parametrize(
    ("how", "rows"),
    [("stock", 2), ("bias", 1), ("invariant", 2), ("no whole tiles", 1)],
)
@pytest.mark.parametrize("served", ["on_cpu", "kernels"])
def test_without_a_gate_a_layer_multiplies_what_its_halves_give(
    served: str, how: str, rows: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("stock" if how == "stock" else served)
    layer = layer_of(n=160 if how == "no whole tiles" else 192, bias=how == "bias")
    layer.invariant = how == "invariant"
    x = mx.random.normal((rows, 128)).astype(mx.float16)

    y = layer.gated(x)

    half = layer.output_dims // 2
    gate, up = layer.parts(x, (half, half))
    assert mx.array_equal(y, nn.silu(gate) * up)
    assert not any(plan.problem.epilogue.gated for plan in graph.plans_built())


@pytest.mark.usefixtures("on_cpu")
def test_what_was_measured_of_a_product_says_nothing_of_gate_and_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = problem_of(1, 192, 128, layout="marlin")
    plan = planner.make(plain, device=H200, kernel="mma", simdgroups_n=1)
    times = {label(plan): 1.0}
    result = Result(
        plan=plan, stock=False, medians_us=times, clock="wall time", date="2026-11-22"
    )
    stored = result_files.Stored(results={plain: result})
    monkeypatch.setattr(measured_results, "_found", cache(lambda *_: stored))
    found = measured_results.find(plain, H200, "cuda")
    assert found is not None
    assert found.plan == plan
    layer, x = layer_of(), mx.random.normal((1, 128)).astype(mx.float16)

    layer.gated(x)

    assert graph.plans_built()[-1].problem.epilogue.gated


@pytest.mark.usefixtures("stock")
def test_no_rows_have_half_the_columns() -> None:
    w = mlx_marlin.quantize(mx.zeros((192, 128), mx.float16))
    x, none = mx.zeros((0, 128), mx.float16), mx.zeros(())
    prepared = dispatch.prepare(packed_request(x, w, GATED))
    assert prepared.run(x, none, none, none).shape == (0, 96)


@given(
    m=st.integers(1, 130),
    pairs=st.integers(1, 40),
    k=st.integers(1, 40).map(lambda groups: 64 * groups),
)
def test_plans_have_both_halves_of_a_result_in_a_block(
    m: int, pairs: int, k: int
) -> None:
    asked = problem_of(m, 64 * pairs, k, layout="marlin", epilogue=GATED)
    plan = planner.choose(asked, H200)

    assert asked.result_shape == (m, 32 * pairs)
    assert plan.simdgroups_n % 2 == 0
    assert plan.reduction == "none"


def test_a_result_is_half_as_large() -> None:
    plain = problem_of(4, 256, 128, layout="marlin")
    gated = replace(plain, epilogue=GATED)

    assert (plain.columns, gated.columns) == (256, 128)
    assert 2 * gated.output_bytes == plain.output_bytes
    assert "silu(gate) * up" in gated.explain()
    assert Epilogue(gated=True).explain() == "gate * up"


def problem_of_gate(n: int, **more: Any) -> Problem:
    return problem_of(1, n, 1024, layout="marlin", epilogue=GATED, **more)


def planned(**overrides: Any) -> Plan:
    fields = {"simdgroups_n": 2} | overrides
    return planner.make(problem_of_gate(192), device=H200, **fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(Epilogue, gated=True, bias=True), "has an activation only, got bias"),
        (partial(Epilogue, gated=True, multiply=True), "multiply=True"),
        (partial(Epilogue, gated=True, residual=True), "residual=True"),
        (partial(Epilogue, gated=True, parts=(1, 2)), r"parts=\(1, 2\)"),
        (partial(problem_of_gate, 33), "even n, got n=33"),
        (partial(problem_of_gate, 64, batch=2), "got n=64, batch=2"),
        (partial(planned, simdgroups_n=3), "simdgroups_n=3, reduction='none'"),
        (partial(planned, strategy="split_k", k_parallel=2), "reduction='workspace'"),
        (
            lambda: planner.make(problem_of_gate(96), device=H200),
            "whole tiles of 32 columns each, and n is 96",
        ),
    ],
)
def test_what_gate_and_up_cannot_have_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()
