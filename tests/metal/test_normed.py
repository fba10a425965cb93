"""RMSNorm in the product of one or two rows on Metal: deferred to the epilogue."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_emulator import emulated, trace
from mlx_marlin.backends import devices, graph, planner, selection
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal.main_loop import loop_of
from mlx_marlin.guard import known_answers
from mlx_marlin.guard.miniatures import instances_of, miniatures
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from support import drawn_arrays, oracles, strategies
from support.cuda_cases import normalized
from support.gate_and_up import layer_of
from support.normed_products import Normed
from support.oracles import exact
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only, needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]

SILU = Epilogue(activation="silu", gated=True)
PARTS = Epilogue(bias=True, parts=(64, 96, 32))
DEVICE = devices.named("Apple M4 Max")
THERE = serving.Place(device=DEVICE, is_here=False)
K = 448


def problem_of(m: int, n: int = 192, layout: str = "mlx", **options: object) -> Problem:
    fields = {"m": m, "n": n, "k": K, "layout": layout, "norm": 1e-5, **options}
    return Problem(**fields)


@st.composite
def normed_plans(draw: st.DrawFn) -> Plan:
    """Draws any plan of a product of normalized rows, sensible or not."""
    some = draw(
        strategies.problems(max_m=2, max_n=80, max_k=512, formats=strategies.ANY_FORMAT)
    )
    gated = draw(st.booleans())
    packed = some.layout == "marlin"
    n = some.n if not gated else 64 * -(-some.n // 40) if packed else 2 * some.n
    epilogue = Epilogue(bias=draw(st.booleans())) if not gated else SILU
    problem = replace(some, n=n, epilogue=epilogue, norm=draw(st.floats(0, 0.5)))
    body = planner.make(problem, device=DEVICE)
    halves = 1 + gated
    count = halves * draw(st.integers(1, 8 // halves))
    return replace(
        body,
        simdgroups_k=count,
        operand=draw(strategies.operands(problem, body.kernel)),
    )


@drawn(3, plan=normed_plans(), seed=st.integers(0, 2**16))
def test_every_plan_normalizes_its_rows(plan: Plan, seed: int) -> None:
    assert Normed(plan=plan, seed=seed).wrong_result() is None


@sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("epilogue", [PLAIN, PARTS, SILU], ids=Epilogue.explain)
@pytest.mark.parametrize("m", [1, 2])
def test_each_dtype_and_epilogue(
    m: int, epilogue: Epilogue, layout: str, dtype: str
) -> None:
    options = {"dtype": dtype, "scale_dtype": dtype, "epilogue": epilogue}
    plan = planner.make(problem_of(m, layout=layout, **options), device=DEVICE)
    assert Normed(plan=plan).wrong_result() is None


@sampled(2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_ones_are_exact(dtype: str, layout: str) -> None:
    """Their mean square is 1, so the factor is, and all sums are small integers."""
    options = {"dtype": dtype, "scale_dtype": dtype, "norm": 0.0}
    plan = planner.make(problem_of(2, layout=layout, **options), device=DEVICE)
    words = mx.random.randint(0, 2**31, (192, K // 8), key=mx.random.key(1))
    scales, biases = mx.ones((192, K // 64)), mx.full((192, K // 64), -8)
    native = (words.astype(mx.uint32), scales, biases)
    x, norm = mx.array([1, -1] * (K // 2)), mx.arange(K) % 3 - 1
    x, norm, *others = (
        each.astype(getattr(mx, dtype))
        for each in (mx.stack([x, mx.ones(K)]), norm, scales, biases)
    )
    stored = drawn_arrays.stored(plan.problem, (native[0], *others))

    y = graph.product(plan)(x, *stored, x, x, x, norm)

    codes = (np.array(native[0])[..., None] >> np.arange(0, 32, 4)) & 15
    weight = codes.reshape(192, K).astype(np.float64) - 8
    expected = mx.array((exact(x) * exact(norm)) @ weight.T).astype(y.dtype)
    assert mx.array_equal(y, expected)


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "epilogue"), [("mlx", SILU), ("marlin", PLAIN), ("marlin", SILU)]
)
def test_traced_moved_or_in_another_order_the_bits_are_the_same(
    layout: str, epilogue: Epilogue
) -> None:
    problem = problem_of(2, layout=layout, epilogue=epilogue)
    case = Normed(plan=planner.make(problem, device=DEVICE))
    first = case.run(*case.arrays())

    for seed in (1, 2):
        with drawn_arrays.another_schedule(seed):
            assert mx.array_equal(first, case.run(*case.arrays()), equal_nan=True)
    if selection.backend() == "emulator":
        moved = (drawn_arrays.shifted(each, 3) for each in case.arrays())
        with emulated(trace=True):
            assert mx.array_equal(first, case.run(*moved))


@sampled(1)
@emulator_only
@pytest.mark.parametrize("epilogue", [SILU, PLAIN], ids=Epilogue.explain)
def test_a_launch_reads_each_weight_once(epilogue: Epilogue) -> None:
    problem = problem_of(2, 256, "marlin", k=512, epilogue=epilogue)
    case = Normed(plan=planner.make(problem, device=DEVICE))
    arrays = case.arrays()

    (found,) = trace(lambda: case.run(*arrays))

    assert found.of("w").read_bytes == 256 * 512 // 2
    assert found.of("w").repeated_read_bytes == 0
    assert found.count("barrier") == case.plan.num_threadgroups


def test_a_number_that_is_none_stays_in_its_row() -> None:
    case = Normed(plan=planner.make(problem_of(2), device=DEVICE))
    x, *others = case.arrays()
    whole = case.run(x, *others)
    values = np.array(x)
    values[1, 7] = np.nan

    y = case.run(mx.array(values), *others)

    assert mx.all(mx.isnan(y[1])).item()
    assert mx.array_equal(y[0], whole[0])


def test_it_is_more_exact_than_a_norm_that_rounds() -> None:
    """MLX rounds normalized rows to float16; here they are never stored."""
    case = Normed(plan=planner.make(problem_of(2, layout="marlin"), device=DEVICE))
    x, norm, *stored = case.arrays()
    weight = drawn_arrays.weight_of(case.plan.problem, seed=1).decoded
    expected = normalized(x, norm, 1e-5) @ weight.T
    rounded = exact(mx.fast.rms_norm(x, norm, 1e-5)) @ weight.T

    ours = oracles.error(case.run(x, norm, *stored), expected)

    assert ours < np.linalg.norm(rounded - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("epilogue", [PLAIN, SILU, PARTS], ids=Epilogue.explain)
def test_the_guard_checks_the_same_instance(epilogue: Epilogue) -> None:
    n = 192 if epilogue.parts else 24576
    large = problem_of(2, n, "marlin", k=4096, epilogue=epilogue)
    plan = planner.make(large, device=DEVICE)

    for small in miniatures(plan):
        assert small.problem.bytes < 2**20
        assert instances_of(small) == instances_of(plan)
        assert small.problem.norm == plan.problem.norm
    if epilogue == SILU:
        assert known_answers.fault_of(plan) is None


@given(
    m=st.integers(1, 2),
    pairs=st.integers(1, 40),
    groups=st.integers(1, 40),
    gated=st.booleans(),
)
def test_plans_have_whole_tiles(m: int, pairs: int, groups: int, gated: bool) -> None:
    epilogue = SILU if gated else PLAIN
    problem = problem_of(m, 64 * pairs, "marlin", k=64 * groups, epilogue=epilogue)
    plan = planner.choose(problem, DEVICE)
    assert (plan.kernel, plan.reduction, plan.dispatches) == ("gemv", "none", 1)
    assert plan.is_whole


def test_the_model_counts_the_norm() -> None:
    normed = problem_of(2, 8192, "marlin", k=4096)
    loops = [loop_of(each, 0, False, DEVICE) for each in (normed, plain(normed))]
    assert loops[0].slots > loops[1].slots


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"m": 3}, "normalize at most 2 rows, got m=3"),
        ({"m": 2, "invariant": True}, "normalize no rows of products that are invar"),
    ],
)
def test_what_kernels_do_not_normalize_is_stated(
    options: dict[str, object], words: str
) -> None:
    problem = replace(problem_of(1, layout="marlin"), **options)
    assert words in str(serving.serve_problem(problem, THERE))


@pytest.mark.parametrize(
    "overrides",
    [{"strategy": "split_k"}, {"strategy": "hytis"}, {"kernel": "gemm_register"}],
)
def test_no_other_plan_has_a_norm(overrides: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"norm=1e-05 needs gemv, at most 2 rows"):
        planner.make(problem_of(2, 512), device=DEVICE, **overrides)


def test_norm_and_product_stay_apart_where_that_is_predicted_to_be_faster() -> None:
    """Three tiles keep 3 of 40 cores busy; splits of k keep all."""
    problem = problem_of(2, 96, "marlin", k=65536)
    assert "a product and its norm" in str(metal.handover(problem, DEVICE))
    assert metal.handover(problem_of(1, 6144, "marlin", k=4096), DEVICE) is None


def plain(problem: Problem) -> Problem:
    return replace(problem, norm=None)


@pytest.mark.usefixtures("kernels")
@sampled(3)
@pytest.mark.parametrize("rows", [(), (1,), (2, 1), (3,), (0,)], ids=str)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_takes_its_norm(
    rows: tuple[int, ...], layout: str, gated: bool
) -> None:
    layer, norm = layer_of(layout), norm_module()
    x = mx.random.normal((*rows, 128), key=mx.random.key(1)).astype(mx.float16)

    y = layer.normed(x, norm, gated=gated)

    assert mx.allclose(y, apart(layer, norm, x, gated), rtol=4e-3, atol=4e-3)
    fused = any(plan.problem.norm for plan in graph.plans_built())
    assert fused == (rows in ((1,), (2, 1)))


def test_a_layer_has_the_gradient_of_its_parts() -> None:
    layer, norm = layer_of("marlin"), norm_module()
    x = mx.random.normal((2, 128), key=mx.random.key(1)).astype(mx.float16)

    def total(x: mx.array, run: Callable[..., mx.array]) -> mx.array:
        return run(x).astype(mx.float32).sum()

    ours = mx.grad(lambda x: total(x, lambda x: layer.normed(x, norm, gated=True)))(x)

    parts = mx.grad(lambda x: total(x, lambda x: apart(layer, norm, x, True)))(x)
    assert mx.allclose(ours, parts, rtol=1e-2, atol=1e-2)


def apart(layer: MarlinLinear, norm: nn.RMSNorm, x: mx.array, gated: bool) -> mx.array:
    y = layer(norm(x))
    if not gated:
        return y
    gate, up = mx.split(y, 2, axis=-1)
    return nn.silu(gate) * up


def norm_module() -> nn.RMSNorm:
    norm = nn.RMSNorm(128, eps=1e-5)
    norm.weight = (1 + mx.random.uniform(shape=(128,), key=mx.random.key(2))).astype(
        mx.float16
    )
    return norm
