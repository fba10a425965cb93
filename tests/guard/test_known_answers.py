"""Known answers of products and their bounds, and what exceeds them."""

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.build import weight_template
from mlx_marlin.guard import experts, known_answers, operands, reference
from mlx_marlin.guard.miniatures import AnyPlan
from mlx_marlin.guard.reference import Answer, EpilogueArrays
from mlx_marlin.planning.epilogue import PLAIN, Epilogue, Rotation
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.bit_streams import codes_of_words
from mlx_marlin.weights.dtypes import dtype as dtype_of
from support.answers_by_formula import (
    UNIT,
    assert_close,
    exact,
    expected,
    gate_and_up,
)
from support.cuda_cases import GATED, GATED_N, h200
from support.format_cases import E2M1, E4M3, E8M0
from support.guarded_calls import LARGE, NATIVE, formats, of_experts
from support.marks import needs_emulator
from support.profiles import sampled

ROTATED = Rotation(features=32, columns=96, factor=1.25)
NORMED = replace(ROTATED, norm=0.5, queries=64, per_row=True)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("float32", {}),
    ("float16", {"batch": 2}),
    ("float16", {"epilogue": Epilogue(bias=True, activation="gelu")}),
    ("bfloat16", {"epilogue": Epilogue(multiply=True, activation="silu")}),
    ("float16", {"epilogue": Epilogue(residual=True, activation="gelu_approx")}),
    ("float32", {"epilogue": Epilogue(multiply=True, residual=True)}),
    ("bfloat16", {"epilogue": Epilogue(gated=True, activation="gelu_approx")}),
    ("float16", {"epilogue": Epilogue(gated=True)}),
    ("float16", {"norm": 0.25}),
    ("bfloat16", {"norm": 1e-5, "epilogue": Epilogue(rotation=ROTATED, bias=True)}),
    ("float16", {"epilogue": Epilogue(rotation=NORMED)}),
]


@pytest.mark.parametrize(("dtype", "change"), CASES, ids=str)
def test_answers_and_bounds_are_those_of_the_formulas(
    dtype: str, change: dict[str, Any]
) -> None:
    problem = problem_of(11, 128, 128, dtype=dtype, **change)
    batch = (problem.batch,) if problem.batch > 1 else ()
    x = operands.activations(problem, (*batch, 11, 128))
    weight = operands.draw(problem, batch)
    arrays = known_answers._drawn_epilogue_arrays(problem)
    if arrays.positions is not None:  # near ones, see `assert_close`
        arrays = replace(arrays, positions=arrays.positions % 10)
    with mx.stream(mx.cpu):
        answer = reference.product(problem, x, weight, arrays)
        mx.eval(answer.values, answer.bound)
    assert_close(answer, expected(problem, exact(x), weight, arrays))


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_gates_are_clipped_as_gpt_oss_clips_them_and_no_others(activation: str) -> None:
    gate, up = (np.tile(np.linspace(-9, 12, 43), (2, 1)) for _ in range(2))
    up = up[:, ::-1] - 3
    off = np.full(gate.shape, 0.25)
    with mx.stream(mx.cpu):
        both = [
            Answer(mx.array(each.tolist(), mx.float64), mx.full(off.shape, 0.25))
            for each in (gate, up)
        ]
        answer = reference.gated(activation, *both)
    assert_close(answer, gate_and_up(activation, (gate, off), (up, off)))


def test_the_arrays_of_an_epilogue_are_those_that_it_needs_and_all_differ() -> None:
    every = ("bias", "multiply", "residual", "norm", "positions", "freqs")
    given: dict[str, Any] = {"norm": 1e-5, "dtype": "bfloat16"}
    full = Epilogue(bias=True, multiply=True, residual=True)
    small = problem_of(3, 96, 64, epilogue=full, **given)
    arrays = known_answers._drawn_epilogue_arrays(small)
    shapes = {name: getattr(arrays, name) for name in every}
    assert [each if each is None else each.shape for each in shapes.values()] == [
        *((96,), (3, 96), (3, 96), (64,), None, None)
    ]
    drawn = [arrays.bias, arrays.multiply, arrays.residual, arrays.norm]
    heads = [str(each.flatten()[:64].tolist()) for each in drawn if each is not None]
    assert len({*heads}) == 4
    assert {each.dtype for each in drawn if each is not None} == {mx.bfloat16}
    x = operands.activations(small, (3, 64))
    passed = known_answers._as_arguments(small, x, arrays)
    assert [id(each) for each in passed] == [id(each) for each in drawn]
    plain = replace(small, epilogue=PLAIN, norm=None)
    none = known_answers._drawn_epilogue_arrays(plain)
    assert none == EpilogueArrays() or vars_of(none) == vars_of(EpilogueArrays())
    assert known_answers._as_arguments(plain, x, none) == []
    normed = replace(small, epilogue=PLAIN)
    only = known_answers._drawn_epilogue_arrays(normed)
    passed = known_answers._as_arguments(normed, x, only)
    assert [id(each) for each in passed] == [*[id(x)] * 3, id(only.norm)]

    for per_row, count in ((True, 3), (False, 1)):
        rotation = replace(NORMED, per_row=per_row)
        turned = replace(small, epilogue=Epilogue(rotation=rotation), norm=None)
        arrays = known_answers._drawn_epilogue_arrays(turned)
        assert arrays.positions is not None
        assert arrays.freqs is not None
        assert arrays.positions.tolist() == [3, 4, 70_003][-count:]
        assert arrays.positions.dtype == mx.int32
        np.testing.assert_allclose(
            np.array(arrays.freqs), 10000 ** (np.arange(16) / 16), rtol=1e-5
        )
        q, k = arrays.head_norms
        assert q.shape == k.shape == (32,)
        assert not mx.array_equal(q, k)
        passed = known_answers._as_arguments(turned, x, arrays)
        order = [x, x, x, arrays.positions, arrays.freqs, q, k]
        assert [id(each) for each in passed] == [id(each) for each in order]


def vars_of(arrays: EpilogueArrays) -> list[Any]:
    return [getattr(arrays, name) for name in EpilogueArrays.__slots__]


def answer_of(values: mx.array, bound: float) -> Answer:
    with mx.stream(mx.cpu):
        wide = values.astype(mx.float64)
        answer = Answer(wide, mx.full(wide.shape, bound, mx.float64))
        mx.eval(answer.values, answer.bound)
    return answer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("size", "wrong"), [(1, 1), (40, 1), (40, 40), (4096, 1), (4096, 4096)]
)
def test_nan_is_wrong_in_few_results_and_in_many(
    size: int, wrong: int, dtype: str
) -> None:
    """Also where the answer is exact, and in the results that show a bias."""
    values = mx.arange(size).astype(dtype_of(dtype))
    found = mx.where(mx.arange(size) >= size - wrong, mx.nan, values)
    found = found.astype(values.dtype)
    for bound in (0.0, 0.5, math.inf):
        answer = answer_of(values, bound)
        assert reference.difference(values, answer) is None
        said = reference.difference(found, answer)
        assert str(said).startswith(f"{wrong} of {size} results are wrong")


def test_differences_count_results_and_tell_the_worst() -> None:
    values = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    answer = answer_of(values, 0.25)
    off = mx.zeros((3, 4))
    off[0, 1], off[1, 2], off[2, 3] = 0.25, 0.5, -1.0
    assert reference.difference(values + off, answer) == (
        "2 of 12 results are wrong, by up to 4 times the allowed error"
    )
    off[1, 2] = off[2, 3] = -0.25  # as much as is allowed
    assert reference.difference(values + off, answer) is None
    assert reference.difference(values[:2], answer) == (
        "the result has shape (2, 4), not (3, 4)"
    )
    nothing = answer_of(values, 0.0)
    assert reference.difference(values + off, nothing) == (
        "3 of 12 results are wrong, by up to 2.5e+29 times the allowed error"
    )
    assert reference.difference(mx.full((3, 4), mx.inf), answer) == (
        "12 of 12 results are wrong, by up to inf times the allowed error"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("direction", [1, -1])
def test_a_mean_error_of_a_third_of_a_rounding_is_told(
    direction: int, dtype: str
) -> None:
    """Results are ones and minus ones; the values beside them are off by a share."""
    unit = UNIT[dtype]
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)
    y = mx.array(signs).astype(dtype_of(dtype))

    def said(share: float, count: int = 64) -> str | None:
        # The size of each value is 1 / (1 + share unit), so the error is the share.
        values = mx.array((signs / (1 + direction * share * unit)).tolist(), mx.float64)
        bound = mx.ones((count,), mx.float64)
        return reference.difference(y[:count], Answer(values[:count], bound))

    with mx.stream(mx.cpu):
        assert said(0.349) is None
        assert said(0.351, count=63) is None
        told = said(0.351)
        if dtype == "float32":
            assert told is None
        else:
            assert told == (
                f"results are {direction * 0.35:+.2f} of a rounding error off on "
                f"average, as if cut off"
            )
            assert said(5) == (
                f"results are {direction * 2:+.2f} of a rounding error off on "
                f"average, as if cut off"
            )


@pytest.mark.parametrize(("dtype", "least"), [("float16", -13), ("bfloat16", -118)])
def test_subnormal_results_show_no_bias(dtype: str, least: int) -> None:
    """The smallest size that counts is above 2^least: 64 of them are enough."""
    unit = UNIT[dtype]

    def said(size: float, others: int) -> str | None:
        values = [size] * 64 + [2.0**least / 4] * others
        y = mx.array(values, mx.float64)
        answer = Answer(y / (1 + unit), mx.ones_like(y))
        return reference.difference(y.astype(dtype_of(dtype)), answer)

    with mx.stream(mx.cpu):
        assert said(2.0 ** (least + 1), 0) is not None
        # Those that do not count do not make the mean smaller either.
        assert "+1.00 of" in str(said(2.0 ** (least + 1), 1000))
        assert said(2.0**least, 1000) is None


def truncated(y: mx.array) -> mx.array:
    """Returns float32 results as bfloat16 that are cut off, not rounded."""
    return (y.view(mx.uint32) >> 16).astype(mx.uint16).view(mx.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_that_are_cut_off_are_told_from_rounded_ones(dtype: str) -> None:
    problem = problem_of(16, 256, 1024, dtype=dtype)
    x = operands.activations(problem, (16, 1024))
    weight = operands.draw(problem)
    with mx.stream(mx.cpu):
        answer = reference.product(problem, x, weight, reference.EpilogueArrays())
        sums = answer.values.astype(mx.float32)
        if dtype == "bfloat16":
            cut = truncated(sums)
        else:
            nearest = sums.astype(mx.float16)
            larger = mx.abs(nearest.astype(mx.float32)) > mx.abs(sums)
            bits = nearest.view(mx.uint16)
            cut = mx.where(larger, bits - 1, bits).view(mx.float16)

    assert reference.difference(sums.astype(getattr(mx, dtype)), answer) is None
    assert "as if cut off" in str(reference.difference(cut, answer))


def without_subnormals(problem: Problem, codes: mx.array) -> mx.array:
    """Returns codes as a kernel sees them that decodes subnormal numbers as zero."""
    magnitude = codes & ((1 << (problem.bits - 1)) - 1)
    subnormal = magnitude < (8 if problem.bits == 8 else 2)
    return mx.where(subnormal, mx.zeros_like(codes), codes)


@sampled(2)
@needs_emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["product", "silu", "swiglu_oai"])
def test_lost_subnormal_codes_are_found_in_gated_products(
    kind: str, mode: str, dtype: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"mode": mode, "dtype": dtype, "layout": "marlin"}
    if kind == "product":
        problem = problem_of(9, GATED_N, 1024, epilogue=GATED, **form)
        few = {"kernel": "mma", "simdgroups_n": 2, "simdgroups_k": 2}
        plan: AnyPlan = planner.make(problem, device=h200(), **few)
    else:
        problem = problem_of(12, 256, 512, **form)
        plan = planner.choose_gather(of_experts(problem, 4, kind), h200())
    assert known_answers.fault_of(plan) is None
    lay_out = operands._lay_out

    def lossy(problem: Problem, codes: mx.array, *parameters: mx.array) -> Any:
        return lay_out(problem, without_subnormals(problem, codes), *parameters)

    monkeypatch.setattr(operands, "_lay_out", lossy)
    assert "results are wrong" in str(known_answers.fault_of(plan))


@pytest.mark.parametrize("form", formats(), ids=str)
def test_known_answers_have_their_special_rows(form: dict[str, Any]) -> None:
    problem = problem_of(1, 40, LARGE, **form)
    drawn = operands.draw(problem)
    with mx.stream(mx.cpu):
        least, largest = (mx.abs(drawn.exact[row]) for row in (1, 2))
        if problem.format.codes == "floating":
            assert (least > 0).all().item()
            assert (10 * least.min() < largest.min()).item()
        else:
            assert (drawn.exact.min() < 0).item()
            assert (drawn.exact.max() > 0).item()
    assert weight_template(problem)["BITS"] == problem.bits


@pytest.mark.parametrize("form", NATIVE, ids=str)
def test_known_answers_are_what_definitions_say(form: dict[str, Any]) -> None:
    problem = problem_of(1, 40, LARGE, dtype="float32", **form)
    drawn = operands.draw(problem)
    w, scales, biases = drawn.stored
    size = form["group_size"]
    codes = np.array(codes_of_words(w, form["bits"]))
    if form["mode"] == "affine":
        own, values, offsets = np.array(scales), codes, np.array(biases)
    else:
        own = (E4M3 if size == 16 else E8M0)[np.array(scales)]
        values = (E4M3 if form["bits"] == 8 else E2M1)[codes]
        offsets = np.zeros(own.shape)
    expected = np.repeat(own, size, -1) * values + np.repeat(offsets, size, -1)
    np.testing.assert_allclose(np.array(drawn.exact), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("count", [5, 12])
def test_no_two_experts_have_the_same_weights(layout: str, count: int) -> None:
    problem = problem_of(1, 83, 256, layout=layout)
    every = experts._of_all_experts(problem, count)
    assert every == replace(problem, n=32 * (3 + count - 1))
    drawn = operands.draw(every)
    firsts = [experts._first_tiles(count, nth) for nth in (0, 1)]
    for first in firsts:
        words = experts._stored(problem, drawn, first)[0]
        assert len({str(each.tolist()) for each in words}) == count
    assert all(gate != up for gate, up in zip(*firsts, strict=True))
