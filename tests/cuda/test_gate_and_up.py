"""Gate and up as one product whose epilogue multiplies them."""

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import launcher, planner, result_files, tuned_results
from mlx_marlin.backends.cuda import source
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.measurement import Result, label
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import dispatch
from mlx_marlin.products.request import packed_request
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import GATED, GATED_N, GATED_WAYS, Case
from support.gate_and_up import layer_of
from support.marks import needs_emulator
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
@needs_emulator
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
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_approx"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_formats_and_activations(
    format: tuple[str, int, int, str], activation: str
) -> None:
    case: Case = (*format, "float16", *GATED_WAYS[0])
    epilogue = replace(GATED, activation=activation)
    weight, x = cuda_cases.draw(case, n=GATED_N)

    y = cuda_on_cpu.run(
        cuda_on_cpu.plan_of(case, epilogue=epilogue, n=GATED_N), x, weight
    )

    expected = epilogues.finished(exact(x) @ weight.decoded.T, (), epilogue)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@sampled(4)
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [(), (1,), (2, 9), (3, 50), (0,)], ids=str)
@pytest.mark.parametrize("layout", ["marlin", "mlx"])
def test_a_layer_gates_half_of_it(rows: tuple[int, ...], layout: str) -> None:
    layer, x = layer_of(layout), mx.random.normal((*rows, 128)).astype(mx.float16)

    y = layer.gated(x)

    native = layer_of("mlx").native()  # the same weight, as MLX quantizes it
    product = oracles.product(x, *native, group_size=64)
    expected = epilogues.finished(product, (), GATED)
    assert (y.shape, y.dtype) == ((*rows, 96), mx.float16)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    gated = [plan.problem.epilogue.gated for plan in launcher.plans_built()]
    assert any(gated) == (layout == "marlin" and 0 not in rows)


@pytest.mark.usefixtures("stock")
def test_without_kernels_a_layer_multiplies_what_its_halves_give() -> None:
    assert_apart(layer_of("marlin"), rows=2)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("how", ["bias", "invariant", "no whole tiles"])
def test_and_where_kernels_have_no_gate(how: str, rows: int) -> None:
    layer = layer_of("marlin", n=160 if how == "no whole tiles" else 192)
    if how == "bias":
        layer["bias"] = mx.random.normal((192,)).astype(mx.float16)
    layer.invariant = how == "invariant"
    assert_apart(layer, rows)


@needs_emulator
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
    monkeypatch.setattr(tuned_results, "_found", cache(lambda *_: stored))
    found = tuned_results.find(plain, H200, "cuda")
    assert found is not None
    assert found.plan == plan
    layer, x = layer_of("marlin"), mx.random.normal((1, 128)).astype(mx.float16)

    layer.gated(x)

    assert launcher.plans_built()[-1].problem.epilogue.gated


@pytest.mark.usefixtures("stock")
def test_no_rows_have_half_the_columns() -> None:
    w = mlx_marlin.quantize(mx.zeros((192, 128), mx.float16))
    x, none = mx.zeros((0, 128), mx.float16), mx.zeros(())
    prepared = dispatch.prepare(packed_request(x, w, GATED))
    assert prepared.run(x, none, none, none).shape == (0, 96)


def assert_apart(layer: MarlinLinear, rows: int) -> None:
    x = mx.random.normal((rows, 128)).astype(mx.float16)
    y = layer.gated(x)
    half = layer.output_dims // 2
    gate, up = layer.parts(x, (half, half))
    assert mx.array_equal(y, nn.silu(gate) * up)
    assert not any(plan.problem.epilogue.gated for plan in launcher.plans_built())


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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bias": True}, "gated=True has an activation only, got bias=True"),
        ({"multiply": True}, "multiply=True"),
        ({"residual": True}, "residual=True"),
        ({"parts": (1, 2)}, r"parts=\(1, 2\)"),
    ],
)
def test_nothing_else_is_done_to_gate_and_up(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Epilogue(gated=True, **more)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"n": 33}, "even n, got n=33"), ({"batch": 2}, "got n=64, batch=2")],
)
def test_there_are_two_halves_of_one_product(more: dict[str, Any], words: str) -> None:
    sizes = {"m": 1, "n": 64, "k": 64} | more
    with pytest.raises(ValueError, match=words):
        Problem(**sizes, epilogue=GATED)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"simdgroups_n": 3}, "simdgroups_n=3, reduction='none'"),
        ({"strategy": "split_k", "k_parallel": 2}, "reduction='workspace'"),
    ],
)
def test_a_plan_that_parts_them_is_refused(
    overrides: dict[str, Any], words: str
) -> None:
    asked = problem_of(1, 192, 1024, layout="marlin", epilogue=GATED)
    with pytest.raises(ValueError, match=words):
        planner.make(asked, device=H200, **{"simdgroups_n": 2} | overrides)


def test_halves_that_are_no_whole_tiles_are_refused() -> None:
    asked = problem_of(1, 96, 1024, layout="marlin", epilogue=GATED)
    with pytest.raises(ValueError, match="whole tiles of 32 columns each, and n is 96"):
        planner.make(asked, device=H200)


def test_the_text_declares_the_gate_and_reads_no_array_more() -> None:
    plan = planner.choose(
        problem_of(1, 192, 1024, layout="marlin", epilogue=GATED), H200
    )
    text = source.of_product(plan)

    assert text.name == "marlin_mma_gated"
    assert text.input_names == ("x", "w", "scales", "numbers")
    assert (
        "const marlin::Paired<marlin::Gated<ACTIVATION>> epilogue{};\n" in text.source
    )
