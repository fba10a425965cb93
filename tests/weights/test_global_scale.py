"""nvfp4 weights with a global scale, through all kernels."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
import mlx_marlin
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import quantize, unpack
from support import drawn_arrays, format_cases, launches, oracles
from support.choose import Choose
from support.format_cases import Variant, Weight
from support.profiles import sampled
from support.trace_mode import emulator_only

pytestmark = pytest.mark.usefixtures("kernels")

N, K = 70, 384
SCALE = mx.array(3.7)
VARIANTS = [
    Variant("nvfp4", 4, 16, layout, dtype, "uint8", fragments, "exact", split)
    for (fragments, split), (layout, dtype) in product(
        product((0, 1, 2), (False, True)),
        (("mlx", "float16"), ("marlin", "bfloat16"), ("marlin", "float32")),
    )
]
variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def weight_of(variant: Variant, n: int = N, k: int = K, seed: int = 1) -> Weight:
    return replace(variant.weight(n, k, seed=seed), global_scale=SCALE)


def with_scale(problem: Problem) -> Problem:
    return replace(problem, global_scale=True)


def case_of(
    variant: Variant, threadgroups: int = 7, **changes: object
) -> tuple[Plan, mx.array, Weight]:
    """Makes a plan of a variant with a global scale, and its operands."""
    m = 11 if variant.fragments else variant.rows
    plan = variant.plan(m, N, K, threadgroups=threadgroups)
    plan = replace(plan, problem=with_scale(plan.problem), **changes)
    x = format_cases.activations(m, K, dtype=variant.dtype, seed=2)
    return plan, x, weight_of(variant)


@sampled(4)
@variants
def test_a_product_is_as_exact_as_without(variant: Variant) -> None:
    plan, x, weight = case_of(variant)

    y = format_cases.run(plan, x, weight)

    expected = oracles.exact(x) @ weight.decoded.T
    assert oracles.error(y, expected) < oracles.TOLERANCES[variant.dtype]
    terms = np.abs(oracles.exact(x)) @ np.abs(weight.decoded).T
    allowed = 4 * 2.0**-24 * terms + oracles.ROUNDING[variant.dtype] * np.abs(expected)
    assert (np.abs(oracles.exact(y) - expected) <= allowed).all()
    for seed in (1, 2):
        with drawn_arrays.another_schedule(seed):
            again = format_cases.run(plan, x, weight)
        assert mx.array_equal(again.view(mx.uint8), y.view(mx.uint8))


@sampled(2)
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_staged_product_is_as_exact_as_without(layout: str, buffers: int) -> None:
    variant = replace(VARIANTS[0], layout=layout, dtype="float16", fragments=1)
    staged = {"kernel": "gemm_staged", "buffers": buffers}
    plan, x, weight = case_of(variant, **staged)

    y = format_cases.run(plan, x, weight)

    expected = oracles.exact(x) @ weight.decoded.T
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@sampled(1)
@emulator_only
@pytest.mark.parametrize("variant", VARIANTS[::4], ids=str)
def test_every_byte_that_is_read_is_the_calls_own(variant: Variant) -> None:
    plan, x, weight = case_of(variant, threadgroups=3)

    with metal_emulator.emulated(trace=True):
        y = format_cases.run(plan, x, weight)

    assert mx.array_equal(y, format_cases.run(plan, x, weight))


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_plain_numbers_are_those_of_mlx(layout: str) -> None:
    variant = replace(VARIANTS[0], layout=layout, dtype="float32")
    weight = weight_of(variant)
    plan: DequantizePlan = dequantize_plan(with_scale(variant.problem(1, N, K)))

    w = launches.dequantized(plan)(*format_cases.arguments(weight, layout))

    expected = mx.dequantize(*weight.native, mode="nvfp4", global_scale=SCALE)
    assert expected.dtype == mx.float32
    np.testing.assert_allclose(oracles.exact(w), weight.decoded, rtol=2.0**-22)
    np.testing.assert_allclose(oracles.exact(w), oracles.exact(expected), rtol=2.0**-22)


W = (mx.random.normal((N, K), key=mx.random.key(1)) / 8).astype(mx.float16)
LARGEST = mx.abs(W).max().astype(mx.float32)
X = mx.random.normal((2, 3, K), key=mx.random.key(2)).astype(mx.float16)


def decoded() -> oracles.Floats:
    codes = mx.quantize(W, mode="nvfp4", global_scale=LARGEST)
    return oracles.exact(mx.dequantize(*codes, mode="nvfp4", global_scale=LARGEST))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_quantize_and_pack_carry_it(shape: tuple[int, ...]) -> None:
    scale = LARGEST.reshape(shape)
    codes = mx.quantize(W, mode="nvfp4", global_scale=scale)

    for packed in (
        quantize(W, mode="nvfp4", global_scale=scale),
        mlx_marlin.pack(*codes, mode="nvfp4", global_scale=scale),
    ):
        assert packed.global_scale is scale
        for ours, theirs in zip(unpack(packed), codes, strict=True):
            assert mx.array_equal(ours, theirs)
        assert mlx_marlin.why_not(X, packed) is None
        y = mlx_marlin.quantized_matmul(X, packed)
        assert oracles.error(y, oracles.exact(X) @ decoded().T) < 1e-3


def test_it_is_no_coarser_than_a_weight_without() -> None:
    small = W * 2.0**-7  # scales near the limits of E4M3
    without = mx.dequantize(*mx.quantize(small, mode="nvfp4"), mode="nvfp4")
    packed = quantize(small, mode="nvfp4", global_scale=LARGEST * 2.0**-7)

    y = mlx_marlin.quantized_matmul(mx.eye(K), packed)

    assert oracles.error(y.T, oracles.exact(small)) < 0.8 * oracles.error(
        without, oracles.exact(small)
    )


@sampled(3)
@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_parts_have_it_too(rows: int, biased: bool, invariant: bool) -> None:
    packed = quantize(W, mode="nvfp4", global_scale=LARGEST)
    x = mx.random.normal((rows, K), key=mx.random.key(4)).astype(mx.float16)
    bias = mx.random.normal((N,), key=mx.random.key(3)).astype(mx.float16)

    parts = mlx_marlin.linears(
        x,
        packed,
        parts=(20, N - 20),
        bias=bias if biased else None,
        invariant=invariant,
    )

    total = oracles.exact(x) @ decoded().T + (oracles.exact(bias) if biased else 0)
    assert [part.shape for part in parts] == [(rows, 20), (rows, N - 20)]
    assert oracles.error(mx.concatenate(parts, axis=-1), total) < 1e-3


def test_epilogues_weights_as_they_are_and_invariant_rows_have_it() -> None:
    packed = quantize(W, mode="nvfp4", global_scale=LARGEST)
    bias = mx.random.normal((N,), key=mx.random.key(3)).astype(mx.float16)
    rows = X.reshape(-1, K)

    y = mlx_marlin.linear(X, packed, bias=bias, activation="silu")
    back = mlx_marlin.quantized_matmul(X[..., :N], packed, transpose=False)
    together = mlx_marlin.linear(rows, packed, invariant=True)

    total = oracles.exact(X) @ decoded().T + oracles.exact(bias)
    assert oracles.error(y, total / (1 + np.exp(-total))) < 1e-3
    assert oracles.error(back, oracles.exact(X[..., :N]) @ decoded()) < 1e-3
    assert oracles.error(together, oracles.exact(rows) @ decoded().T) < 1e-3
    for i in range(len(rows)):
        alone = mlx_marlin.linear(rows[i : i + 1], packed, invariant=True)
        assert mx.array_equal(alone[0], together[i])


def test_gradients_know_it() -> None:
    codes = mx.quantize(W, mode="nvfp4", global_scale=LARGEST)
    x = X.astype(mx.float32)

    def loss(x: mx.array, scale: mx.array) -> mx.array:
        packed = mlx_marlin.pack(*codes, mode="nvfp4", global_scale=scale)
        return mlx_marlin.quantized_matmul(x, packed).square().sum()

    dx, dscale = mx.grad(loss, argnums=(0, 1))(x, LARGEST)

    total = oracles.exact(x) @ decoded().T
    assert oracles.error(dx, 2 * total @ decoded()) < 1e-5
    # The loss is quadratic in the scale.
    np.testing.assert_allclose(
        dscale.item(), 2 * (total**2).sum() / LARGEST.item(), rtol=1e-5
    )


@pytest.mark.parametrize("transpose", [True, False])
def test_stock_serves_it_where_no_kernel_runs(backend: Choose, transpose: bool) -> None:
    # Without its scale the weight is so large that a half could not hold the product.
    packed = quantize(W, mode="nvfp4", global_scale=LARGEST)
    x = 16 * (X if transpose else X[..., :N])
    backend("stock")

    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is not None
    assert y.dtype == mx.float16
    expected = oracles.exact(x) @ (decoded().T if transpose else decoded())
    assert oracles.error(y, expected) < 1e-3


def test_a_problem_says_that_it_has_one() -> None:
    problem = VARIANTS[0].problem(1, N, K)

    assert with_scale(problem) != problem
    assert "uint8 scales, a global scale," in with_scale(problem).explain()
    assert "global" not in problem.explain()
