"""What checks give to kernels, and what they compare the results with."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.backends import graph, kernels, planner
from mlx_marlin.backends.devices import named
from mlx_marlin.guard import experts, known_answers, operands, reference
from mlx_marlin.guard.miniatures import miniatures
from mlx_marlin.guard.reference import Answer, EpilogueArrays, KernelError, evaluate
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue, Heads, Rotation
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.bit_streams import codes_of_words
from mlx_marlin.weights.tile_conversion import (
    deinterleave,
    rows_of_tiles,
    tiles_of_rows,
)
from support.answers_by_formula import (
    OF_FUNCTION,
    OF_SUM,
    Pair,
    Reals,
    assert_close,
    exact,
    gate_and_up,
    norms,
    rounded,
    with_heads,
)
from support.cuda_cases import h200
from support.guarded_calls import K, N

SPLIT = {"kernel": "gemm_register", "strategy": "split_k", "k_parallel": 2}
Compared = list[tuple[mx.array, Answer]]


@pytest.fixture(autouse=True)
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[mx.array]]:
    """Lists what is evaluated, and holds all that answers need to the CPU.

    GPUs have no float64: their checks would be mistakes, and their kernels not serve.
    All numbers are drawn by keys: a check is the same each time, and moves no seed.
    """
    found: list[mx.array] = []
    seed = np.array(mx.random.state[0])
    evaluates, on = mx.eval, mx.stream

    def evaluate(*trees: Any) -> None:
        found.extend(each for _, each in tree_flatten(trees))
        evaluates(*trees)

    inside: list[Any] = []

    @contextmanager
    def stream(device: Any) -> Iterator[None]:
        assert device == mx.cpu
        inside.append(device)
        with on(device):
            yield
        inside.pop()

    def on_the_cpu(operator: str) -> Callable[..., Any]:
        own = getattr(mx.array, operator)

        def operate(array: mx.array, *others: Any, **options: Any) -> Any:
            doubles = [each for each in (array, *others) if is_double(each)]
            caller = sys._getframe(1).f_globals["__name__"]
            assert inside or not doubles or not caller.startswith("mlx_marlin.guard")
            return own(array, *others, **options)

        return operate

    for operator in ("__add__", "__sub__", "__mul__", "__truediv__", "sum", "astype"):
        monkeypatch.setattr(mx.array, operator, on_the_cpu(operator))
    monkeypatch.setattr(mx, "eval", evaluate)
    monkeypatch.setattr(mx, "stream", stream)
    yield found
    np.testing.assert_array_equal(np.array(mx.random.state[0]), seed)


def is_double(value: Any) -> bool:
    """Returns whether an operation with a value, or to it, needs float64."""
    dtype = value.dtype if isinstance(value, mx.array) else value
    return isinstance(dtype, mx.Dtype) and dtype == mx.float64


def assert_among(arrays: Sequence[mx.array], found: Sequence[mx.array]) -> None:
    """Asserts identity: a kernel's operands have been evaluated before it."""
    assert {*map(id, arrays)} <= {*map(id, found)}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    """Lists what checks compare; every result is taken for right."""
    found: Compared = []
    monkeypatch.setattr(reference, "difference", lambda *both: found.append(both))
    return found


def served(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    evaluated: Sequence[mx.array],
) -> list[Any]:
    """Lets a function of the plan and its arrays serve, and lists the plans."""
    plans: list[Any] = []

    def call(plan: Any) -> Callable[..., Any]:
        plans.append(plan)

        def serve(*arrays: mx.array) -> Any:
            assert_among(arrays, evaluated)
            return run(plan, *arrays)

        return serve

    monkeypatch.setattr(graph, "call", call)
    return plans


@pytest.mark.parametrize(("norm", "per_stream"), [(None, False), (0.5, True)])
def test_rotated_heads_of_streams_are_those_of_their_positions(
    norm: float | None,
    per_stream: bool,
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: list[mx.array],
) -> None:
    assert known_answers.FAR == 70_003
    monkeypatch.setattr(known_answers, "FAR", 11)  # see `assert_close`
    heads = Heads(heads=2, kv_heads=1, features=32, columns=128, norm=norm, factor=1.25)
    given: list[tuple[mx.array, ...]] = []

    def run(plan: HeadsPlan, *arrays: mx.array) -> list[mx.array]:
        given.append(arrays)
        return [mx.zeros((plan.streams, count, 3, 32)) for count in (2, 1)]

    plan = HeadsPlan(heads, "float16", 7, 3, per_stream)
    plans = served(monkeypatch, run, evaluated)
    assert known_answers.fault_of(plan) is None
    counts = (2, 8) if per_stream else (2,)
    assert plans == [replace(plan, streams=count) for count in counts]
    assert len(compared) == 2 * len(plans)
    for nth, (streams, arrays) in enumerate(zip(counts, given, strict=True)):
        qkv, first, freqs, *weights = arrays
        count = streams if per_stream else 1
        assert first.tolist() == [*(37 - 5 * i for i in range(count - 1)), 11]
        assert (first.dtype, freqs.dtype) == (mx.int32, mx.float32)
        assert (qkv.shape, qkv.dtype) == ((streams, 3, 128), mx.float16)
        assert len(weights) == (0 if norm is None else 2)
        for each in weights:
            assert (each.shape, each.dtype) == ((32,), mx.float16)
            assert ((each >= 0.5) & (each <= 2)).all().item()
        assert len({str(each.tolist()) for each in weights}) == len(weights)
        angles = 100 ** (np.arange(16) / 16)
        np.testing.assert_allclose(exact(freqs), angles, rtol=1e-5)
        positions = mx.array(
            [first.tolist()[i % count] + j for i in range(streams) for j in range(3)]
        )
        points = exact(qkv).reshape(-1, 128)[:, :96]
        operands = EpilogueArrays(
            positions=positions, freqs=freqs, head_norms=tuple(weights)
        )
        values, off = with_heads(
            (points, np.zeros_like(points)), heads.rotation, operands
        )
        off = rounded(values, off + np.abs(values) * OF_FUNCTION, "float16")[1]
        rows = streams, 3, 3, 32
        values, off = (x.reshape(rows).swapaxes(1, 2) for x in (values, off))
        for (_, answer), part in zip(
            compared[2 * nth : 2 * nth + 2], (slice(2), slice(2, 3)), strict=True
        ):
            assert_close(answer, (values[:, part], off[:, part]))


def test_a_sum_and_its_norm_are_those_of_three_rows(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, evaluated: list[mx.array]
) -> None:
    given: list[mx.array] = []

    def run(_: Any, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        given.extend(arrays)
        return arrays[0] + arrays[1], arrays[0]

    plan = AddNormPlan(9, "bfloat16", 24, 0.5)
    plans = served(monkeypatch, run, evaluated)
    assert known_answers.fault_of(plan) is None
    assert plans == [replace(plan, rows=3)]
    assert [(x.shape, x.dtype) for x in given] == [
        *[((3, 24), mx.bfloat16)] * 2,
        ((24,), mx.bfloat16),
    ]
    assert not mx.array_equal(given[0], given[1])
    x, y, weight = map(exact, given)
    assert (np.abs(weight - 1.25) <= 0.75).all()
    (total, of_sum), (normed, of_norm) = compared
    assert_among((total, normed), evaluated)
    assert normed is given[0]
    assert_close(of_sum, rounded(x + y, np.zeros_like(x), "bfloat16"))
    rows = exact(total)
    values = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.5) * weight
    assert_close(of_norm, rounded(values, np.abs(values) * OF_FUNCTION, "bfloat16"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("of_all", [False, True])
def test_experts_and_scores_of_five_rows_are_known_in_any_order(
    of_all: bool,
    last: bool,
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: list[mx.array],
) -> None:
    as_asked = last

    def run(_: Any, logits: mx.array) -> tuple[mx.array, mx.array]:
        values = exact(logits)
        thirds = np.round(values * 3)
        assert values.shape == (5, 40)
        assert {*thirds.flatten()} <= {*range(-6, 6)}
        assert (np.abs(values - thirds / 3) < 1e-3).all()
        order = -values if not as_asked else -values[:, ::-1]
        best = np.argsort(order, axis=-1, kind="stable")[:, :4]
        best = 39 - best if as_asked else best
        chosen = np.sort(best, axis=-1)
        exps = np.exp(values)
        own = np.take_along_axis(exps, chosen, -1)
        scores = own / (exps if of_all else own).sum(-1, keepdims=True)
        scored.append(scores)
        returned.extend((mx.array(chosen.astype(np.uint32)), mx.array(scores)))
        return returned[-2], returned[-1]

    scored: list[Reals] = []
    returned: list[mx.array] = []
    plan = RoutePlan(1, "float16", 40, 4, of_all, last)
    plans = served(monkeypatch, run, evaluated)
    assert known_answers.fault_of(plan) is None
    assert plans == [replace(plan, rows=5)]
    assert_among(returned, evaluated)
    ((_, answer),) = compared
    assert_close(answer, (scored[0], scored[0] * 2**-16))
    as_asked = not last
    assert known_answers.fault_of(plan) == "it chose the wrong experts"


def test_combined_results_are_known_for_one_row_and_several(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, evaluated: list[mx.array]
) -> None:
    given: list[tuple[mx.array, ...]] = []

    def run(_: Any, *arrays: mx.array) -> mx.array:
        given.append(arrays)
        return arrays[2]

    plan = CombinePlan(3, "float16", 24, 4)
    plans = served(monkeypatch, run, evaluated)
    assert known_answers.fault_of(plan) is None
    assert plans == [replace(plan, rows=rows) for rows in (1, 5)]
    for rows, arrays, (_, answer) in zip((1, 5), given, compared, strict=True):
        assert [(each.shape, each.dtype) for each in arrays] == [
            ((rows, 4, 1, 24), mx.float16),
            ((rows, 4), mx.float32),
            ((rows, 24), mx.float16),
        ]
        results, scores, residual = map(exact, arrays)
        assert scores.min() < 0 < scores.max()
        terms = results[:, :, 0] * scores[..., None]
        size = np.abs(residual) + np.abs(terms).sum(1)
        assert_close(
            answer, rounded(residual + terms.sum(1), size * OF_FUNCTION, "float16")
        )


@pytest.mark.parametrize(("to", "bits", "group"), [("mlx", 4, 32), ("marlin", 3, 128)])
def test_moved_codes_are_known_and_one_wrong_bit_is_told(
    to: str,
    bits: int,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: list[mx.array],
) -> None:
    """In groups of 32, k ends within a packed tile."""
    wrong = 0
    k, size = (1120, 32) if group == 32 else (1088, 64)

    def run(_: Any, words: mx.array) -> mx.array:
        move = tiles_of_rows if to == "marlin" else rows_of_tiles
        moved = move(words, 51, k, bits=bits, group_size=group)
        moved[..., -1:] = moved[..., -1:] ^ wrong
        given.append(words if to == "marlin" else moved)
        return moved

    given: list[mx.array] = []
    plan = RepackPlan(to=to, n=N, k=K, bits=bits, group_size=group)
    plans = served(monkeypatch, run, evaluated)
    assert known_answers.fault_of(plan) is None
    (small,) = plans
    assert small == replace(plan, batch=(2,), n=51, k=k, group_size=size)
    codes = codes_of_words(given[0], bits)
    assert codes.shape == (2, 51, k)
    assert {*np.unique(np.array(codes))} == {*range(2**bits)}
    wrong = 1 << 31
    assert known_answers.fault_of(plan) == "it moved codes to wrong positions"


def test_decoded_weights_are_known_whole_and_transposed(
    compared: Compared,
    evaluated: list[mx.array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_of(300, N, K, layout="marlin")
    shapes: list[tuple[int, ...]] = []

    def decoded_blocks(plan: Any) -> Callable[..., list[mx.array]]:
        rows = [block[1::2] for block in plan.chunks]
        shapes.extend(rows)
        assert len(rows) > 1

        def decode(*weight: mx.array) -> list[mx.array]:
            assert_among(weight, evaluated)
            return [mx.zeros(shape) for shape in rows]

        return decode

    monkeypatch.setattr(graph, "decoded_blocks", decoded_blocks)
    assert known_answers.fault_of(dequantize_plan(problem)) is None
    assert shapes == [*[(32, 192), (19, 192)], *[(51, 64)] * 3]
    weight = operands.draw(problem_of(1, 51, 192, layout="marlin"))
    values, magnitude = exact(weight.exact), exact(weight.magnitude)
    assert len(compared) == 2
    for y, answer in compared:
        assert y.shape == (51, 192)
        assert_close(answer, rounded(values, magnitude * 2**-20, "float16"))


def test_a_nan_that_spreads_or_is_lost_is_told(evaluated: list[mx.array]) -> None:
    x = mx.array(np.arange(24).reshape(2, 3, 4), mx.float16)
    y = mx.array(np.arange(30).reshape(2, 3, 5), mx.float16)
    nan = y + 0
    nan[1, 2] = mx.nan
    given: list[mx.array] = []

    def fault(again: mx.array) -> str | None:
        def result(changed: mx.array) -> mx.array:
            given.append(changed)
            assert_among([changed], evaluated)
            return again

        return known_answers._fault_of_nan(y, x, result)

    assert fault(nan) is None
    assert_among([nan], evaluated)
    (changed,) = given
    assert np.argwhere(np.isnan(np.array(changed))).tolist() == [[1, 2, 0]]
    changed[1, 2, 0] = 20
    assert mx.array_equal(changed, x)
    lost = "NaN in x did not come out of its row"
    assert fault(y) == lost
    one = y + 0
    one[1, 2, 4] = mx.nan
    assert fault(one) == lost
    for row in (0, 4):
        other = nan.reshape(6, 5)
        other[row, 4] += 1
        assert fault(other.reshape(2, 3, 5)) == (
            "rows changed when another row became NaN, or from run to run"
        )


def test_a_result_that_cannot_be_evaluated_is_an_error_of_its_kernel(
    evaluated: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised inside the mark, and what was begun before has ended."""
    entered: list[str] = []

    @contextmanager
    def marked() -> Iterator[None]:
        entered.append("begun")
        yield
        entered.append("ended")

    monkeypatch.setattr(mx, "synchronize", lambda: entered.append("waited"))
    right = mx.ones((4,))
    with kernels.watched(marked):
        evaluate(right)
        assert entered == ["waited", "begun", "ended"]
        assert_among([right], evaluated)
        for compares in (
            lambda y: reference.difference(y, Answer(right, right)),
            lambda y: known_answers._fault_of_nan(y, mx.ones((2, 2)), lambda _: y),
            evaluate,
        ):
            wrong = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
            with pytest.raises(KernelError):
                compares(wrong)


def test_parts_are_compared_side_by_side() -> None:
    """Those of rotated heads are [rows, heads, 1, features]."""
    y = mx.arange(96).reshape(3, 32)
    plain = problem_of(3, 32, 64)
    assert known_answers._whole(y, plain) is y
    parts: Any = mx.split(y, [8, 24], axis=1)
    of_parts = replace(plain, epilogue=Epilogue(parts=(8, 16, 8)))
    assert mx.array_equal(known_answers._whole(parts, of_parts), y)
    heads = y.reshape(3, 4, 1, 8)
    rotation = Rotation(features=8, columns=16)
    rotated = replace(of_parts, epilogue=Epilogue(parts=(8, 16, 8), rotation=rotation))
    split: Any = mx.split(heads, [1, 3], axis=1)
    assert mx.array_equal(known_answers._whole(split, rotated), heads)


@pytest.mark.parametrize("options", [SPLIT, {"kernel": "gemv"}], ids=str)
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_every_small_product_is_compared_and_the_first_with_a_nan(
    wrong: int | None,
    options: dict[str, Any],
    evaluated: list[mx.array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that adds atomically has no order of its sums, so no NaN is tried."""
    batch = 1 if wrong is None else 3
    plan = planner.make(problem_of(3, N, K, batch=batch), device=m3(), **options)
    plans = miniatures(plan)
    asked: list[Any] = []
    faults = iter(range(9))

    def product(small: Any, *, listed: bool = True) -> Callable[..., mx.array]:
        asked.append((small, listed))

        def serve(x: mx.array, *others: mx.array) -> mx.array:
            assert_among((x, *others), evaluated)
            size = small.problem.m, small.problem.k
            assert x.shape == (size if batch == 1 else (2, *size))
            return mx.zeros(small.problem.result_shape)

        return serve

    def difference(*_: Any) -> str | None:
        return "it differs" if next(faults) == wrong else None

    def fault_of_nan(y: mx.array, x: mx.array, result: Any) -> str | None:
        asked.append("NaN")
        assert y.shape == result(x).shape
        return "it spreads" if wrong == 1 else None

    monkeypatch.setattr(graph, "product", product)
    monkeypatch.setattr(reference, "difference", difference)
    monkeypatch.setattr(known_answers, "_fault_of_nan", fault_of_nan)
    every: list[Any] = [(each, False) for each in plans]
    told = known_answers.fault_of(plan)
    if wrong == 0:
        assert (told, asked) == ("it differs", every[:1])
    elif wrong == 1:
        assert (told, asked) == ("it spreads", [*every[:1], "NaN"])
    else:
        assert (told, asked) == (None, [*every[:1], "NaN", *every[1:]])


def m3() -> Any:
    return named("Apple M3 Max", None)


GATHERED: list[tuple[Any, str, str, int, str | None, bool]] = [
    (m3, "mlx", "float16", 1, None, False),
    (m3, "marlin", "bfloat16", 0, None, False),
    (h200, "marlin", "float16", 2, None, True),
    (h200, "marlin", "bfloat16", 2, "silu", False),
    (h200, "marlin", "float16", 0, "swiglu_oai", True),
]


@pytest.mark.parametrize(
    ("device", "layout", "dtype", "per_row", "gate", "bias"),
    GATHERED,
    ids=lambda value: getattr(value, "__name__", str(value)),  # no address
)
def test_products_of_experts_are_those_of_the_weights_that_are_given(
    device: Callable[[], Any],
    layout: str,
    dtype: str,
    per_row: int,
    gate: str | None,
    bias: bool,
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: list[mx.array],
) -> None:
    problem = problem_of(12, 256, 512, layout=layout, dtype=dtype)
    gather = GatherProblem(
        problem=problem, experts=16, pairs_per_row=per_row, gate=gate, bias=bias
    )
    (plan,) = miniatures(planner.choose_gather(gather, device()))
    small, per_row = plan.problem, plan.pairs_per_row
    given: list[mx.array] = []

    def product(*arrays: mx.array) -> mx.array:
        given.extend(arrays)
        assert_among(arrays, evaluated)
        return mx.zeros((small.m, 1, small.n))

    monkeypatch.setattr(graph, "gather_product", lambda _: product)
    assert experts.fault_of(plan) is None
    x, *rest = given
    weights = [rest[:3], [*rest[3:5], rest[4]]] if gate else [rest[:3]]
    rest = rest[5 if gate else 3 :]
    biases = rest[: len(weights)] if bias else []
    experts_of, *sources = rest[len(biases) :]

    pairs = range(small.m)
    rows = small.m // per_row if per_row else small.m + 1
    assert (x.shape, len(sources)) == ((rows, small.k), not per_row)
    assert experts_of.tolist() == [expert_of(pair, plan.experts) for pair in pairs]
    row_of = [pair // per_row if per_row else (7 * pair + 1) % rows for pair in pairs]
    for each in sources:
        assert (each.tolist(), each.dtype) == (row_of, mx.uint32)
    assert experts_of.dtype == mx.uint32

    answers = []
    for index, stored in enumerate(weights):
        w, magnitude = decoded(small, stored, plan.experts)
        assert len({each.tobytes() for each in w}) == plan.experts
        chosen = np.array(experts_of)
        xs = exact(x)[row_of]
        y = np.einsum("pk,pnk->pn", xs, w[chosen])
        off = norms(xs)[:, None] * norms(magnitude)[chosen] * OF_SUM[dtype]
        if bias:
            assert biases[index].shape == (plan.experts, small.n)
            y = y + exact(biases[index])[chosen]
        answers.append((y, off))
    assert len(biases) < 2 or not mx.array_equal(*biases)
    values, off = gate_and_up(gate, *answers) if gate else answers[0]
    ((found, answer),) = compared
    assert found.shape == (small.m, small.n)
    known, bound = rounded(values, off, dtype)
    np.testing.assert_allclose(exact(answer.values), known, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(exact(answer.bound), bound, rtol=1e-4)


def expert_of(pair: int, experts: int) -> int:
    """Most pairs have the last expert; the others in few, one and two pairs."""
    if pair % 100 in (4, 5):
        return 2
    if pair == 3:
        return 1
    return 0 if pair % 5 == 1 else experts - 1


def decoded(problem: Problem, stored: Sequence[mx.array], experts: int) -> Pair:
    """Returns weights [experts, n, k] of affine codes, and what their terms add to."""
    words, scales, biases = stored
    n, k, size = problem.n, problem.k, problem.group_size
    if problem.layout == "marlin":
        words = rows_of_tiles(words, n, k, bits=problem.bits, group_size=size)
        scales, biases = deinterleave(scales, n, problem.groups, 2)
    codes = np.array(codes_of_words(words, problem.bits)).astype(float)
    assert codes.shape == (experts, n, k)
    scaled = codes * np.repeat(exact(scales), size, -1)
    offset = np.repeat(exact(biases), size, -1)
    return scaled + offset, np.abs(scaled) + np.abs(offset)
