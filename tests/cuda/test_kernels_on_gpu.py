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
from mlx_marlin.backends import devices, graph
from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products.packing import pack
from support import cuda_cases, cuda_experts, launches, oracles
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
    integers,
)
from support.cuda_products import Product
from support.format_cases import arguments
from support.oracles import exact
from support.rotated_layers import EACH, arrays_of, layer_of, norm_module, rows_of

pytestmark = [
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="MLX has no CUDA device here"
    ),
    pytest.mark.usefixtures("kernels"),
]

on_gpu = pytest.mark.cuda
REPEATS = 100
AFFINE = ("affine", 4, 64)
PACKED = (*AFFINE, "marlin", "float16")
SCALED = replace(EACH, factor=1.25)
WHOLE, SPLIT = WAYS[0], WAYS[3]
WHOLES = (WHOLE, WGMMA_WAYS[0], STAGED_WAYS[0])
SPLITS = (SPLIT, WGMMA_WAYS[3], STAGED_WAYS[3])
TURNS = cycle((("float16", 7), ("bfloat16", 40), ("float16", 40), ("bfloat16", 7)))
WGMMA_TURNS = cycle((("float16", 13), ("bfloat16", 64), ("bfloat16", 24)))
STAGED_TURNS = cycle((("float16", 13), ("bfloat16", 32), ("bfloat16", 7)))


def possible(plan: Plan) -> Plan:
    """Returns a plan, if this device can run it."""
    here = devices.current()
    capability = here.capability if isinstance(here, CudaDevice) else None
    if plan.is_pipelined and capability != limits.PIPELINED_CAPABILITY:
        pytest.skip(f"{plan.kernel} is Hopper's, and this is {capability}")
    return plan


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
    marks = pytest.mark.cuda_formats if rest else on_gpu
    return pytest.param(Product(case), marks=marks)


PRODUCTS = [
    *(Product(("affine", 4, 128, "marlin", "float16", m, way)) for m, way in LARGE),
    # A split tile's epilogue is the reduce's, whose products have none.
    *(
        Product((*PACKED, 19, way), epilogue)
        for ways in (WHOLES, SPLITS)
        for epilogue, way in zip(EPILOGUES, cycle(ways), strict=False)
    ),
    Product((*AFFINE, "marlin", "bfloat16", *NORMED_WAYS[1]), norm=EPSILON),
    *(
        Product((*PACKED, *GATED_WAYS[way]), epilogue, ROTATED_N, norm)
        for way, epilogue, norm in (
            (0, Epilogue(bias=True, rotation=ROTATION), EPSILON),
            (3, Epilogue(bias=True, rotation=SCALED, parts=(128, 64, 64)), None),
            (1, Epilogue(bias=True, rotation=NORMED_HEADS), None),
        )
    ),
    *(
        Product((*AFFINE, layout, "float16", 5, way), batch=3)
        for layout, way in (
            ("marlin", WHOLE),
            ("mlx", SPLIT),
            ("marlin", WGMMA_WAYS[0]),
            ("marlin", STAGED_WAYS[3]),
        )
    ),
    Product(
        ("nvfp4", 4, 16, "marlin", "float16", 20, STAGED_WAYS[3]), global_scale=True
    ),
]


@pytest.mark.parametrize(
    "product",
    [
        *map(marked, cuda_cases.cases()),
        *(pytest.param(each, marks=on_gpu) for each in PRODUCTS),
    ],
    ids=str,
)
def test_products(product: Product) -> None:
    product.assert_right(same_bits(product.run(possible(product.plan))))


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
    product = Product(("affine", bits, 64, layout, "float16", m, way))
    product.assert_right(product.run(possible(product.plan), cuda_cases.moved)())


# Each kernel by each strategy, and gate and up of "mma" and "wgmma"; heads, which are
# pairs too, have "mma" and "mma_staged".
@on_gpu
@pytest.mark.parametrize(
    ("way", "dtype", "m", "gated"),
    [
        *((way, *next(TURNS), False) for way in WAYS[:5]),
        *((way, *next(WGMMA_TURNS), False) for way in WGMMA_WAYS[:5]),
        *((way, *next(STAGED_TURNS), False) for way in STAGED_WAYS[:5]),
        *((GATED_WAYS[i][1], "bfloat16", GATED_WAYS[i][0], True) for i in (1, 4)),
    ],
    ids=str,
)
def test_integers_are_exact(
    way: dict[str, Any], dtype: str, m: int, gated: bool
) -> None:
    n = GATED_N if gated else N
    weight, x, expected = integers(dtype, m, way, n, gated=gated)
    case: Case = (*AFFINE, "marlin", dtype, m, way)
    plan = cuda_cases.plan_of(case, epilogue=Epilogue(gated=gated), n=n)
    run = graph.product(possible(plan))
    arrays = arguments(weight, "marlin")
    y = same_bits(lambda: run(x, *arrays))
    assert np.array_equal(exact(y), expected)


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
    layer, norm, x = layer_of(), norm_module(), rows_of(3)
    positions, freqs = arrays_of(3, EACH)

    def inside(x: mx.array) -> mx.array:
        total: mx.array = layer.rotated(x, norm, EACH, (), positions, freqs)
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
