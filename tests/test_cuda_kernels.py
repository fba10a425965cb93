"""The CUDA kernels on a GPU: a covering set, each case against NumPy and 100 times.

`pytest -m cuda`; without a CUDA device all are skipped. No more than 150 kernels are
compiled. Integer cases are compared bit for bit, floats with exactly decoded weights in
float64 and with the same product in plain numbers of the same dtype.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import epilogues
import format_cases
import mlx.core as mx
import numpy as np
import oracles
import pytest
from format_cases import GROUPED, Weight, layouts_of, step_of
from oracles import Floats, exact

import mlx_marlin
from mlx_marlin import launch, mma, scheduler
from mlx_marlin.cuda_device import CudaDevice
from mlx_marlin.device import named
from mlx_marlin.packing import pack
from mlx_marlin.plan import Plan, k_tile
from mlx_marlin.problem import PLAIN, Epilogue, Problem

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="MLX has no CUDA device here"
    ),
    pytest.mark.usefixtures("kernels"),
]

REPEATS = 100
N, TILES_K = 200, 7
"""Columns that fill no tile, and k tiles that no number of slices divides."""
Case = tuple[str, int, int, str, str, int, dict[str, Any]]
WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "data_parallel", "simdgroups_n": 2, "simdgroups_k": 3},
    {"strategy": "stripe", "num_threadgroups": 3, "simdgroups_n": 3},
    {"strategy": "split_k", "k_parallel": 3, "simdgroups_n": 1, "simdgroups_k": 2},
    {"strategy": "stream_k", "num_threadgroups": 5, "simdgroups_n": 2},
    {"strategy": "hybrid", "num_threadgroups": 6, "whole": 4, "simdgroups_n": 1},
    {"strategy": "data_parallel", "simdgroups_n": 7, "simdgroups_k": 2},
    {"strategy": "stream_k", "num_threadgroups": 40, "simdgroups_k": 1},
)
ROWS = (1, 9, 17, 32, 8, 33, 16, 25)
EPILOGUES = (
    Epilogue(bias=True),
    Epilogue(activation="silu", multiply=True),
    Epilogue(bias=True, activation="gelu", residual=True),
    Epilogue(activation="gelu_approx", multiply=True, residual=True),
    Epilogue(bias=True, parts=(40, 70, 90)),
)


def h200() -> CudaDevice:
    device = named("NVIDIA H200")
    assert isinstance(device, CudaDevice)
    return device


def cases() -> Iterator[Case]:
    """Yields every format once, and with each the next of all else."""
    dtypes, ways, rows = cycle(mma.DTYPES), cycle(WAYS), cycle(ROWS)
    layouts = cycle((0, 0, -1))
    for mode, bits, group_size in GROUPED:
        here = layouts_of(mode, bits, group_size)[::-1]
        k = step_of(mode, bits, group_size)
        problem = Problem(
            m=1,
            n=N,
            k=k,
            mode=mode,
            bits=bits,
            group_size=group_size or k,
            scale_dtype="uint8" if mode[:2] in ("mx", "nv") else "float16",
            layout="marlin",
        )
        if mma.why_not(problem) is None:
            yield (
                mode,
                bits,
                group_size,
                here[next(layouts)],
                next(dtypes),
                next(rows),
                next(ways),
            )


def plan_of(
    case: Case, *, epilogue: Epilogue = PLAIN, batch: int = 1, **more: Any
) -> Plan:
    mode, bits, group_size, layout, dtype, m, way = case
    k = k_of(mode, bits, group_size)
    problem = Problem(
        m=m,
        n=N,
        k=k,
        batch=batch,
        mode=mode,
        bits=bits,
        group_size=group_size or k,
        dtype=dtype,
        scale_dtype="uint8" if mode[:2] in ("mx", "nv") else dtype,
        layout=layout,
        epilogue=epilogue,
    )
    plan = scheduler.make(problem, device=h200(), **(way | more))
    assert plan.kernel == "mma"
    return plan


def k_of(mode: str, bits: int, group_size: int) -> int:
    """Returns a k that fills no pair of tiles, and where groups let it, no tile."""
    step = step_of(mode, bits, group_size)
    if group_size == 0:
        return step
    return max(TILES_K * k_tile(group_size) // step, 1) * step - (
        step if group_size == 32 else 0
    )


def arrays_of(weight: Weight, layout: str) -> tuple[mx.array, mx.array, mx.array]:
    if layout == "marlin":
        packed = pack(*weight.native, **weight.options)
        return packed.words, packed.scales, packed.third
    w, scales, *biases = weight.native
    return w, scales, biases[0] if biases else scales


def draw(case: Case, seed: int = 1) -> tuple[Weight, mx.array]:
    mode, bits, group_size, _, dtype, m, _ = case
    k = k_of(mode, bits, group_size)
    weight = format_cases.any_weight(
        mode, bits, group_size, N, k, dtype=dtype, seed=seed
    )
    x = mx.random.normal((m, k), key=mx.random.key(seed))
    return weight, x.astype(getattr(mx, dtype))


def same_bits(run: Callable[[], mx.array]) -> mx.array:
    """Runs a product often, beside other work, and returns what it always gives."""
    other = mx.random.normal((1024, 1024)).astype(mx.float16)
    first = run()
    results = []
    for i in range(REPEATS):
        results.append(run())
        if i % 10 == 0:
            other = other @ other * 1e-2
    alike = mx.stack([mx.array_equal(first, each, equal_nan=True) for each in results])
    mx.eval(other, alike)
    assert mx.all(alike).item()
    return first


def assert_right(y: mx.array, x: mx.array, weight: Floats, dtype: str) -> None:
    expected = exact(x) @ weight.T
    assert y.shape == expected.shape
    off = oracles.error(y, expected)
    assert off < oracles.TOLERANCES[dtype]
    plain = mx.array(weight.astype(np.float32)).astype(x.dtype)
    if expected.size >= oracles.MANY:
        assert off <= 2 * oracles.error(x @ plain.T, expected)


@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_every_format(case: Case) -> None:
    weight, x = draw(case)
    plan = plan_of(case)
    run = launch.product(plan)
    arrays = arrays_of(weight, case[3])
    y = same_bits(lambda: run(x, *arrays))
    assert_right(y, x, weight.decoded, case[4])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", mma.DTYPES)
@pytest.mark.parametrize("m", [7, 40])
def test_integers_are_exact(way: dict[str, Any], dtype: str, m: int) -> None:
    rng = np.random.default_rng(m)
    k = 448
    codes = rng.integers(0, 16, (N, k))
    ones = np.ones((N, k // 64), np.float32)
    native = [mx.array(each).astype(getattr(mx, dtype)) for each in (ones, -8 * ones)]
    weight = Weight("affine", 4, 64, (format_cases.write_codes(codes, 4), *native))
    x = mx.array(rng.integers(-1, 2, (m, k)).astype(np.float32))
    x = x.astype(getattr(mx, dtype))
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    run = launch.product(plan_of(case))
    arrays = arrays_of(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    expected = format_cases.rounded(exact(x) @ weight.decoded.T, dtype)
    assert np.array_equal(exact(y), expected)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=Epilogue.explain)
def test_epilogues(way: dict[str, Any], epilogue: Epilogue) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 19, way)
    weight, x = draw(case)
    run = launch.product(plan_of(case, epilogue=epilogue))
    arrays = arrays_of(weight, "marlin")
    shapes = ((N,), (19, N), (19, N))
    keys = mx.random.split(mx.random.key(5), 3)
    drawn = [mx.random.normal(s, key=k) for s, k in zip(shapes, keys, strict=True)]
    bias, multiplier, residual = (each.astype(mx.float16) for each in drawn)
    y = same_bits(lambda: run(x, *arrays, bias, multiplier, residual))
    finish = (bias, multiplier, residual)
    expected = epilogues.finished(exact(x) @ weight.decoded.T, finish, epilogue)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@pytest.mark.parametrize("layout", ["marlin", "mlx"])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
def test_batches(layout: str, way: dict[str, Any]) -> None:
    case: Case = ("affine", 4, 64, layout, "float16", 5, way)
    drawn = [draw(case, seed) for seed in (1, 2, 3)]
    run = launch.product(plan_of(case, batch=3))
    each = zip(*(arrays_of(weight, layout) for weight, _ in drawn), strict=True)
    arrays = [mx.stack(parts) for parts in each]
    x = mx.stack([x for _, x in drawn])
    y = same_bits(lambda: run(x, *arrays))
    for i, (weight, own) in enumerate(drawn):
        assert_right(y[i], own, weight.decoded, "float16")


@pytest.mark.parametrize("layout", ["marlin", "mlx"])
def test_arrays_may_begin_anywhere(layout: str) -> None:
    case: Case = ("affine", 4, 64, layout, "float16", 6, WAYS[0])
    weight, x = draw(case)
    run = launch.product(plan_of(case))

    def moved(array: mx.array) -> mx.array:
        longer = mx.concatenate([array.flatten()[:1], array.flatten()])
        mx.eval(longer)
        return longer[1:].reshape(array.shape)

    arrays = [moved(each) for each in arrays_of(weight, layout)]
    y = run(moved(x), *arrays)
    assert_right(y, x, weight.decoded, "float16")


def test_the_public_call_and_its_reasons() -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 12, {})
    weight, x = draw(case)
    packed = pack(*weight.native, **weight.options)
    assert mlx_marlin.why_not(x, packed) is None
    assert_right(mlx_marlin.quantized_matmul(x, packed), x, weight.decoded, "float16")
    assert mlx_marlin.why_not(x.astype(mx.float32), packed) is not None
    y = mlx_marlin.quantized_matmul(x.astype(mx.float32), packed)
    assert oracles.error(y, exact(x) @ weight.decoded.T) < 1e-3
    gradient = mx.grad(lambda x: mlx_marlin.quantized_matmul(x, packed).sum())(x)
    assert oracles.error(gradient, np.ones((12, N)) @ weight.decoded) < 1e-2


@pytest.mark.parametrize("group_size", [64, 128])
def test_invariant_rows(group_size: int) -> None:
    case: Case = ("affine", 4, group_size, "marlin", "float16", 64, {})
    weight, x = draw(case)
    packed = pack(*weight.native, **weight.options)
    whole = mlx_marlin.linear(x, packed, invariant=True)
    for m in (1, 2, 7, 8, 9, 24, 40):
        part = mlx_marlin.linear(x[:m], packed, invariant=True)
        assert mx.array_equal(part, whole[:m])


def test_nothing_to_add_up() -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 1, {})
    weight, x = draw(case)
    packed = pack(*weight.native, **weight.options)
    assert mlx_marlin.quantized_matmul(x[:0], packed).shape == (0, N)
