"""The operands that are timed, and the check of a timed product."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.measure import operands, timing
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights import super_blocks
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, format_of
from support.oracles import exact
from support.profiles import sampled
from support.timed_products import M3_MAX, exact_product


@pytest.mark.parametrize("chip", ["M1", "M3 Max", "M2 Ultra", "NVIDIA H200"])
@pytest.mark.parametrize("size", [1024, 4096, 16384])
def test_weights_are_larger_than_the_cache_together(chip: str, size: int) -> None:
    problem = Problem(m=1, n=size, k=size)
    cache = (64 if chip in ("M1", "M3 Max") else 128) * 2**20

    count = operands.weight_count(problem, named(chip))

    assert count * problem.weight_bytes > cache
    # And not much larger: memory is the user's.
    assert (count - 1) * problem.weight_bytes <= cache


def test_small_weights_do_not_become_thousands_of_arrays() -> None:
    assert (
        operands.weight_count(Problem(m=1, n=32, k=64), M3_MAX) == operands.MOST_WEIGHTS
    )


@sampled(2, 6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_chains_of_our_operands_stay_finite(dtype: str, layout: str) -> None:
    problem = Problem(
        m=2, n=40, k=2048, dtype=dtype, scale_dtype=dtype, group_size=128, layout=layout
    )
    given = operands.operands(replace(problem, layout="mlx"), 3)
    largest: list[float] = []
    stock = operands.stock_product(problem)

    def product(x: mx.array, *weight: mx.array) -> mx.array:
        y = stock(x, *weight)
        largest.append(float(mx.abs(y).max().item()))
        return y

    timing.chain(product, given.x, cycle(given.weights), 60)

    assert max(largest) < 100
    assert min(largest) > 0.1
    laid_out = operands.operands(problem, 2).weights
    assert len(laid_out) == 2
    assert not mx.array_equal(laid_out[0][0], laid_out[1][0])


@pytest.mark.parametrize("m", [1, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@sampled(3, 9)
def test_operands_and_products_of_every_dtype_and_layout_are_right(
    kernels: None, dtype: str, layout: str, m: int
) -> None:
    problem = problem_of(m, 40, 256, dtype=dtype, layout=layout)
    given = operands.operands(problem, 1)
    product = graph.product(planner.choose(problem, DEFAULT))

    assert operands.is_right(product, given)


@sampled(2, 6)
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("affine", 3, 32),
        ("symmetric", 4, 64),
        ("zero_point", 5, 128),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ],
)
@pytest.mark.parametrize("on", ["kernels", "on_cpu"])
def test_operands_of_every_scheme_are_right_and_a_wrong_product_is_told(
    on: str, mode: str, bits: int, group_size: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(on)  # on_cpu: the CUDA kernels
    target = named("NVIDIA A100") if on == "on_cpu" else DEFAULT
    for layout in format_of(mode, bits).layouts:
        problem = problem_of(
            8, 40, 256, mode=mode, bits=bits, group_size=group_size, layout=layout
        )
        given = operands.operands(problem, 1)
        product = graph.product(planner.choose(problem, target))

        assert operands.is_right(product, given), layout
        assert not operands.is_right(
            lambda *arrays, product=product: 1.05 * product(*arrays), given
        )


@pytest.mark.parametrize("bits", [4, 5])
def test_weights_of_super_blocks_are_spread_around_zero(bits: int) -> None:
    format: dict[str, Any] = {"mode": "k_quant", "bits": bits, "group_size": 32}
    problem = problem_of(2, 40, 512, **format, layout="marlin")
    words, scales, _ = operands.operands(problem, 1).native
    weight = exact(operands.decoded(words, scales, None, **format))
    parameters = super_blocks.float_parameters(scales, problem.format, 32)
    steps, least = (exact(each)[..., None] for each in parameters if each is not None)

    codes = (weight.reshape(40, 16, 32) - least) / steps
    # Codes are all as frequent; a step of theirs is about a tenth of 1 / sqrt(k).
    assert codes.std() == pytest.approx(((4**bits - 1) / 12) ** 0.5, rel=0.03)
    assert 10 * 512**0.5 * abs(steps).mean() == pytest.approx(1, rel=0.1)
    assert abs(10 * 512**0.5 * weight.mean()) < 0.6  # half a step


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_one_wrong_element_makes_a_product_wrong(dtype: str) -> None:
    problem = Problem(m=8, n=512, k=512, dtype=dtype, scale_dtype=dtype)
    given = operands.operands(problem, 1)
    y = exact_product(given)
    assert operands.is_right(lambda *_: y, given)

    half = mx.array(y)
    half[3, 77] = y[3, 77] / 2 if abs(y[3, 77].item()) > 0.1 else 1
    not_a_number = mx.array(y)
    not_a_number[7, 511] = float("nan")
    for wrong in (half, not_a_number, mx.zeros_like(y), y[:, :-1], y[::-1]):
        assert not operands.is_right(lambda *_, wrong=wrong: wrong, given)
