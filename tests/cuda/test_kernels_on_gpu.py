"""The CUDA kernels on a GPU: a covering set, nearly each case 100 times.

`pytest -m cuda`; without a CUDA device all are skipped. On Hopper they have 148
kernels of ours, on other devices fewer. Codes of 2, 3, 5 and 6 bits without biases have
a marker of their own, `pytest -m cuda_formats`: their bits are decoded as those with
biases are, and without biases as 4 and 8 bits are.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.backends import devices, launcher
from mlx_marlin.backends.cuda import pipelined
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.packing import pack
from support import cuda_cases, cuda_experts, epilogues, launches, oracles
from support.cuda_cases import (
    EPILOGUES,
    EPSILON,
    GATED_N,
    GATED_WAYS,
    LARGE,
    NORMED_HEADS,
    NORMED_WAYS,
    ROTATED_N,
    ROTATION,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
    Case,
    N,
    assert_right,
    draw,
    drawn_bias,
    freqs_of,
    integers,
    moved,
    norm_of,
    normalized,
    norms_of,
    operands,
    positions_of,
)
from support.format_cases import GLOBAL_SCALE, arguments
from support.oracles import exact

pytestmark = [
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="MLX has no CUDA device here"
    ),
    pytest.mark.usefixtures("kernels"),
]

on_gpu = pytest.mark.cuda
REPEATS = 100
EACH = replace(ROTATION, per_row=True)
SCALED = replace(EACH, factor=1.25)
WHOLE, SPLIT = WAYS[0], WAYS[3]
WHOLES = (WHOLE, WGMMA_WAYS[0], STAGED_WAYS[0])
SPLITS = (SPLIT, WGMMA_WAYS[3], STAGED_WAYS[3])
TURNS = cycle((("float16", 7), ("bfloat16", 40), ("float16", 40), ("bfloat16", 7)))
WGMMA_TURNS = cycle((("float16", 13), ("bfloat16", 64), ("bfloat16", 24)))
STAGED_TURNS = cycle((("float16", 13), ("bfloat16", 32), ("bfloat16", 7)))


def product_of(case: Case, **more: Any) -> launcher.Product:
    """Returns what computes a case, if this device can."""
    plan = cuda_cases.plan_of(case, **more)
    here = devices.current()
    capability = here.capability if isinstance(here, CudaDevice) else None
    if plan.is_pipelined and capability != pipelined.CAPABILITY:
        pytest.skip(f"{plan.kernel} is Hopper's, and this is {capability}")
    return launcher.product(plan)


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


def marked(case: Case) -> Any:
    """Returns a case of a format with the marker that its test has."""
    mode, bits = case[:2]
    rest = mode in ("symmetric", "zero_point") and bits not in (4, 8)
    return pytest.param(case, marks=pytest.mark.cuda_formats if rest else on_gpu)


@pytest.mark.parametrize("case", [*map(marked, cuda_cases.cases())], ids=str)
def test_every_format(case: Case) -> None:
    weight, x = draw(case)
    run = product_of(case)
    arrays = arguments(weight, case[3])
    y = same_bits(lambda: run(x, *arrays))
    assert_right(y, x, weight.decoded, case[4])


@on_gpu
@pytest.mark.parametrize(("m", "way"), LARGE, ids=str)
def test_blocks_that_models_have(m: int, way: dict[str, Any]) -> None:
    case: Case = ("affine", 4, 128, "marlin", "float16", m, way)
    weight, x = draw(case)
    run = product_of(case)
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    assert_right(y, x, weight.decoded, "float16")


@on_gpu
@pytest.mark.parametrize(
    ("way", "dtype", "m"),
    [
        # Each kernel by each strategy: they come first.
        *((way, *next(TURNS)) for way in WAYS[:5]),
        *((way, *next(WGMMA_TURNS)) for way in WGMMA_WAYS[:5]),
        *((way, *next(STAGED_TURNS)) for way in STAGED_WAYS[:5]),
    ],
    ids=str,
)
def test_integers_are_exact(way: dict[str, Any], dtype: str, m: int) -> None:
    weight, x, expected = integers(dtype, m, way)
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    run = product_of(case)
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    assert np.array_equal(exact(y), expected)


# A split tile's is the reduce's, whose products have none.
@on_gpu
@pytest.mark.parametrize(
    ("epilogue", "way"),
    [
        *zip(EPILOGUES, cycle(WHOLES), strict=False),
        *zip(EPILOGUES, cycle(SPLITS), strict=False),
    ],
    ids=str,
)
def test_epilogues(epilogue: Epilogue, way: dict[str, Any]) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 19, way)
    weight, x = draw(case)
    run = product_of(case, epilogue=epilogue)
    arrays = arguments(weight, "marlin")
    finish = operands(19)
    y = same_bits(lambda: epilogues.whole(run(x, *arrays, *finish)))
    expected = epilogues.finished(exact(x) @ weight.decoded.T, finish, epilogue)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


# "mma" and "wgmma"; heads, which are pairs too, have "mma" and "mma_staged".
@on_gpu
@pytest.mark.parametrize(("m", "way"), [GATED_WAYS[i] for i in (1, 4)], ids=str)
def test_gate_and_up(m: int, way: dict[str, Any]) -> None:
    weight, x, expected = integers("bfloat16", m, way, GATED_N, gated=True)
    case: Case = ("affine", 4, 64, "marlin", "bfloat16", m, way)
    run = product_of(case, epilogue=Epilogue(gated=True), n=GATED_N)
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    assert np.array_equal(exact(y), expected)


@on_gpu
def test_normalized_rows() -> None:
    dtype = "bfloat16"
    case: Case = ("affine", 4, 64, "marlin", dtype, *NORMED_WAYS[1])
    weight, x = draw(case)
    norm = norm_of(x)
    run = product_of(case, norm=EPSILON)
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays, x, x, x, norm))
    expected = normalized(x, norm, EPSILON) @ weight.decoded.T
    assert oracles.error(y, expected) < oracles.TOLERANCES[dtype]


@on_gpu
@pytest.mark.parametrize(
    ("way", "epilogue", "norm"),
    [
        (0, Epilogue(bias=True, rotation=ROTATION), EPSILON),
        (3, Epilogue(bias=True, rotation=SCALED, parts=(128, 64, 64)), None),
        (1, Epilogue(bias=True, rotation=NORMED_HEADS), None),
    ],
    ids=str,
)
def test_rotated_heads(way: int, epilogue: Epilogue, norm: float | None) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", *GATED_WAYS[way])
    weight, x = draw(case, n=ROTATED_N)
    run = product_of(case, epilogue=epilogue, n=ROTATED_N, norm=norm)
    rotation, scale = epilogue.rotation, norm_of(x)
    assert rotation is not None
    bias = drawn_bias(ROTATED_N, x.dtype)
    given = positions_of(len(x), rotation), freqs_of(rotation)
    given = *given, *norms_of(rotation, x.dtype)
    last = () if norm is None else (scale,)
    arrays = (*arguments(weight, "marlin"), bias, x, x, *given, *last)
    y = same_bits(lambda: whole_heads(run(x, *arrays)))
    rows = exact(x) if norm is None else normalized(x, scale, norm)
    total = rows @ weight.decoded.T
    total = total + exact(bias) if epilogue.bias else total
    expected = epilogues.rotated(total, rotation, *given)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@on_gpu
@pytest.mark.parametrize("name", cuda_experts.CALLS)
def test_experts(name: str) -> None:
    call = cuda_experts.CALLS[name]
    y = same_bits(call.run())
    assert oracles.error(y, call.expected) < oracles.TOLERANCES[call.case[4]]


@on_gpu
@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_experts_are_chosen_and_added_up(case: cuda_experts.Choice) -> None:
    case.check(launches.route)
    case.check_sum(launches.combine)
    same_bits(lambda: launches.route(case.logits, case.each, case.of_all, case.last)[1])


def whole_heads(y: Any) -> mx.array:
    """Returns heads of a result or of its parts, side by side."""
    return y if isinstance(y, mx.array) else mx.concatenate([*y], axis=1)


@on_gpu
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("marlin", WHOLE),
        ("mlx", SPLIT),
        ("marlin", WGMMA_WAYS[0]),
        ("marlin", STAGED_WAYS[3]),
    ],
    ids=str,
)
def test_batches(layout: str, way: dict[str, Any]) -> None:
    case: Case = ("affine", 4, 64, layout, "float16", 5, way)
    drawn = [draw(case, seed) for seed in (1, 2, 3)]
    run = product_of(case, batch=3)
    each = zip(*(arguments(weight, layout) for weight, _ in drawn), strict=True)
    arrays = [mx.stack(parts) for parts in each]
    x = mx.stack([x for _, x in drawn])
    y = same_bits(lambda: run(x, *arrays))
    for i, (weight, own) in enumerate(drawn):
        assert_right(y[i], own, weight.decoded, "float16")


@on_gpu
@pytest.mark.parametrize(
    ("layout", "bits", "m", "way"),
    [
        ("marlin", 4, 6, WHOLE),
        ("mlx", 4, 6, WHOLE),
        ("marlin", 4, 30, STAGED_WAYS[0]),
        ("marlin", 3, 50, WGMMA_WAYS[0]),
    ],
    ids=str,
)
def test_arrays_may_begin_anywhere(
    layout: str, bits: int, m: int, way: dict[str, Any]
) -> None:
    case: Case = ("affine", bits, 64, layout, "float16", m, way)
    weight, x = draw(case)
    run = product_of(case)
    arrays = [moved(each) for each in arguments(weight, layout)]
    y = run(moved(x), *arrays)
    assert_right(y, x, weight.decoded, "float16")


@on_gpu
def test_a_global_scale() -> None:
    case: Case = ("nvfp4", 4, 16, "marlin", "float16", 20, STAGED_WAYS[3])
    drawn, x = draw(case)
    weight = replace(drawn, global_scale=mx.array(GLOBAL_SCALE))
    run = product_of(case, global_scale=True)
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    assert_right(y, x, weight.decoded, "float16")


@on_gpu
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


@on_gpu
def test_gradients_of_rotated_heads() -> None:
    """MLX's rope has none of its `freqs` on a GPU: it raises."""
    mx.random.seed(3)
    linear = nn.Linear(128, ROTATED_N, bias=False)
    linear.set_dtype(mx.float16)
    layer = MarlinLinear.from_linear(linear, 64, 4, layout="marlin")
    norm, positions = nn.RMSNorm(128), positions_of(3, EACH)
    norm.set_dtype(mx.float16)
    x = mx.random.normal((3, 1, 128)).astype(mx.float16)

    def inside(x: mx.array) -> mx.array:
        total: mx.array = layer.rotated(x, norm, EACH, (), positions, freqs_of(EACH))
        return (total * total).sum()

    def apart(x: mx.array) -> mx.array:
        y = layer(norm(x)).reshape(3, 4, 1, 64)
        y = mx.concatenate([nn.RoPE(64)(y[:, :3], offset=positions), y[:, 3:]], axis=1)
        return (y * y).sum()

    assert oracles.error(mx.grad(inside)(x), exact(mx.grad(apart)(x))) < 2e-3


@on_gpu
def test_invariant_rows() -> None:
    case: Case = ("affine", 4, 128, "marlin", "float16", 64, {})
    weight, x = draw(case)
    packed = pack(*weight.native, **weight.options)
    whole = mlx_marlin.linear(x, packed, invariant=True)
    for m in (1, 2, 7, 8, 9, 24, 40):
        part = mlx_marlin.linear(x[:m], packed, invariant=True)
        assert mx.array_equal(part, whole[:m])


@on_gpu
def test_nothing_to_add_up() -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 1, {})
    weight, x = draw(case)
    packed = pack(*weight.native, **weight.options)
    assert mlx_marlin.quantized_matmul(x[:0], packed).shape == (0, N)
