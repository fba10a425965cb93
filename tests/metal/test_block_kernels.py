"""Metal kernels of a decoder block that are no products, against float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.backends.build import IN_CONSTANT
from mlx_marlin.backends.launch import Launch
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.block_plans import (
    MOST_NORMED,
    NORM_SIDE,
    NORM_TURNS,
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RoutePlan,
)
from mlx_marlin.products import blocks
from support import cuda_experts, launches
from support.block_kernels import Added, Rotated
from support.oracles import exact
from support.profiles import drawn
from support.trace_mode import emulator_only, needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]

DTYPES = st.sampled_from(["float16", "bfloat16", "float32"])
ROTATED = Rotated(
    streams=3,
    tokens=2,
    heads=3,
    kv_heads=2,
    features=40,
    dtype="float16",
    norm=1e-6,
    factor=1.25,
    first=(5, 0, 70_031),
)
ADDED = Added(rows=3, n=1029, dtype="float16")


@drawn(
    4,
    sizes=st.tuples(*(st.integers(1, top) for top in (9, 8, 5, 4))),
    features=st.sampled_from([16, 18, 64, 66, 128, 130]),
    dtype=DTYPES,
    norm=st.sampled_from([None, 1e-6]),
    per_stream=st.booleans(),
)
def test_heads_are_rotated(
    sizes: tuple[int, int, int, int],
    features: int,
    dtype: str,
    norm: float | None,
    per_stream: bool,
) -> None:
    streams, tokens, heads, kv_heads = sizes
    case = Rotated(
        streams=streams,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        features=features,
        dtype=dtype,
        norm=norm,
        first=tuple(range(3, 3 + streams)) if per_stream else (11,),
    )
    assert case.wrong_result() is None


@drawn(4, rows=st.integers(1, 9), n=st.integers(8, 3000), dtype=DTYPES)
def test_rows_are_added_and_normalized(rows: int, n: int, dtype: str) -> None:
    assert Added(rows=rows, n=n, dtype=dtype).wrong_result() is None


@pytest.mark.parametrize(
    ("n", "threads"),
    [(100, 32), (1024, 256), (1025, 256), (8192, 256), (8193, 512), (16384, 512)],
)
def test_long_rows_have_more_values_per_thread_instead_of_more_threads(
    n: int, threads: int
) -> None:
    plan = AddNormPlan(1, "bfloat16", n, 1e-5)

    assert plan.threadgroup == threads
    assert n <= plan.threadgroup * NORM_SIDE * NORM_TURNS
    assert n <= MOST_NORMED
    assert Added(rows=1, n=n, dtype="bfloat16").wrong_result() is None


@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_experts_are_chosen_and_added_up(case: cuda_experts.Choice) -> None:
    case.check(launches.route)
    case.check_sum(launches.combine)


@pytest.mark.parametrize("case", cuda_experts.SPECIAL_ROUTINGS, ids=str)
def test_logits_that_are_no_numbers(case: cuda_experts.SpecialChoice) -> None:
    case.check(launches.route)


def test_float32_logits_and_results() -> None:
    case = replace(cuda_experts.ROUTINGS[0], dtype="float32")
    case.check(launches.route)
    results, scores = mx.ones((2, 3, 1, 10)), mx.array([[0.5, 1, 2], [1, 1, 1]])
    total = launches.combine(results, scores, mx.ones((2, 10)))
    assert mx.array_equal(total, mx.array([[4.5], [4.0]]) + mx.zeros(10))


CALLS: dict[str, Callable[[], object]] = {
    "rotate_heads": lambda: ROTATED.run(*ROTATED.arrays()),
    "add_norm": lambda: ADDED.run(*ADDED.arrays()),
    "route": lambda: cuda_experts.ROUTINGS[1].check(launches.route),
    "combine": lambda: cuda_experts.ROUTINGS[1].check_sum(launches.combine),
}


@emulator_only
@pytest.mark.parametrize("kernel", CALLS)
def test_trace_mode_reports_nothing(kernel: str) -> None:
    with metal_emulator.emulated(trace=True):
        CALLS[kernel]()


@emulator_only
@pytest.mark.parametrize("case", [ROTATED, ADDED], ids=["rotate_heads", "add_norm"])
def test_every_value_is_read_and_written_once(case: Rotated | Added) -> None:
    first, *_ = arrays = case.arrays()
    (found,) = metal_emulator.trace(lambda *own: case.run(*own), *arrays)[:1]
    if isinstance(case, Added):
        reads, writes = {"x": first.nbytes, "y": first.nbytes}, ("sum", "out")
    else:
        rows, size = first.size // first.shape[-1], first.itemsize
        reads, writes = {"qkv": rows * case.layout.rotated_columns * size}, ("q", "k")
    for name, size in reads.items():
        assert found.of(name).read_bytes == size
    assert found.count("barrier") == (case.rows if isinstance(case, Added) else 0)
    written = sum(found.of(name).written_bytes for name in writes)
    assert written == sum(own.nbytes for own in case.run(*arrays))


@pytest.mark.parametrize("case", [ROTATED, ADDED], ids=["rotate_heads", "add_norm"])
def test_the_same_bits_on_every_run(case: Rotated | Added) -> None:
    arrays = case.arrays()
    first, second = case.run(*arrays), case.run(*arrays)
    assert all(map(mx.array_equal, first, second))


@pytest.mark.parametrize("operand", range(5))
@pytest.mark.parametrize("case", [ROTATED, ADDED], ids=["rotate_heads", "add_norm"])
def test_a_nan_in_one_operand_is_in_its_results(
    case: Rotated | Added, operand: int
) -> None:
    given = [*case.arrays()]
    if operand >= len(given) or given[operand].dtype == mx.int32:
        return
    clean = case.run(*given)
    given[operand] = given[operand] + 0
    given[operand][(0, 1, 3)[-given[operand].ndim :]] = mx.nan

    found = case.run(*given)

    expected = [np.isnan(values) for values, _ in case.expected(*given)]
    assert any(wrong.any() for wrong in expected)
    for own, wrong, right in zip(found, expected, clean, strict=True):
        np.testing.assert_array_equal(np.isnan(exact(own)), wrong)
        np.testing.assert_array_equal(exact(own)[~wrong], exact(right)[~wrong])


@pytest.mark.parametrize("operand", range(3))
def test_a_nan_in_one_operand_is_in_its_sum(operand: int) -> None:
    given = [mx.ones((2, 3, 1, 10)), mx.ones((2, 3)), mx.ones((2, 10))]
    given[operand][(1, 2, 0, 4)[: given[operand].ndim]] = mx.nan

    total = launches.combine(*given)

    wrong = np.zeros((2, 10), bool)
    wrong[1, ((4,), slice(None), (2,))[operand]] = True
    np.testing.assert_array_equal(exact(total), np.where(wrong, np.nan, 4))


PLANS = (
    HeadsPlan(ROTATED.layout, "float16", 1, 2, True),
    AddNormPlan(1, "float16", 1029, 1e-5),
    RoutePlan(1, "float16", 20, 3, False, False),
    CombinePlan(1, "float16", 40, 3),
)


class Launches:
    """Sizes of inputs, by the names of kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state.reset()  # calls are remembered
        self.sizes: dict[str, list[dict[str, int]]] = {}
        own = selection.active().kernel

        def kernel(launch: Launch) -> Any:
            call, text = own(launch), launch.source

            def listed(**arguments: Any) -> Any:
                sizes = [array.size for array in arguments["inputs"]]
                named = dict(zip(text.input_names, sizes, strict=True))
                name = text.name.removeprefix("marlin_")
                self.sizes.setdefault(name, []).append(named)
                return call(**arguments)

            return listed

        monkeypatch.setattr(selection.active(), "kernel", kernel)


def test_few_logits_are_not_in_constant_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)

    chosen, scores = launches.route(mx.array([[1.0, 3, 2, 0]]), 2, True, False)

    assert sorted(chosen.tolist()[0]) == [1, 2]
    assert mx.allclose(scores.sum(), mx.softmax(mx.array([1.0, 3, 2, 0]))[1:3].sum())
    assert seen.sizes["route"][0]["logits"] >= IN_CONSTANT


def test_checks_cover_few_values_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    for plan in (PLANS[0], PLANS[3]):
        assert known_answers.fault_of(plan) is None

    for kernel, name in (("rotate_heads", "positions"), ("combine", "scores")):
        few = [sizes[name] < IN_CONSTANT for sizes in seen.sizes[kernel]]
        assert sorted(few) == [False, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qkv": (3, 2, 279)}, r"qkv has shape \(3, 2, 279\), expected .*280"),
        ({"qkv": (6, 280)}, "qkv has shape"),
        ({"freqs": (19,)}, r"freqs are .*float32 \(19,\), expected float32 \[20\]"),
        ({"norms": 0}, "norms have shapes"),
        ({"norms": 1}, "norms have shapes"),
    ],
)
def test_arrays_that_do_not_fit_heads_are_named(
    changes: dict[str, Any], words: str
) -> None:
    qkv, positions, freqs, *norms = ROTATED.arrays()
    if "qkv" in changes:
        qkv = mx.zeros(changes["qkv"], qkv.dtype)
    freqs = freqs[: changes.get("freqs", freqs.shape)[0]]
    given = (*norms[: changes.get("norms", 2)],)
    with pytest.raises(ValueError, match=words):
        blocks.rotated(ROTATED.layout, qkv, positions, freqs, given)


def test_a_number_has_no_norm() -> None:
    number = mx.array(1.0)
    assert blocks.added_and_normed(number, number, number, 1e-5) is None
