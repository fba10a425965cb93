"""Packed experts, in groups of 16 and other formats that stock MLX does not have."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.products.experts import gather_gated
from mlx_marlin.products.reference.weight import plain
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.format_calls import NOT_IN_MLX
from support.gather_calls import LIMITS, STOCK_AFFINE
from support.packed_codes import packed_weights
from support.profiles import sampled
from support.strategies import Grouped

EXPERTS, N, K = 4, 40, 128
CHOSEN = mx.array([[3, 0], [1, 1], [2, 3], [0, 2], [1, 3]], mx.uint32)
GROUPS_OF_16 = ("affine", 4, 16)


def experts(
    grouped: Grouped, dtype: str = "float32", k: int = K
) -> tuple[PackedWeight, oracles.Floats]:
    return packed_weights(grouped, EXPERTS, n=N, k=k, dtype=dtype)


def rows(*shape: int, dtype: str = "float32") -> mx.array:
    x = mx.random.normal(shape, key=mx.random.key(sum(shape)))
    return x.astype(getattr(mx, dtype))


@sampled(10)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("grouped", NOT_IN_MLX, ids=str)
@pytest.mark.parametrize("dtype", LIMITS)
def test_every_row_meets_the_expert_that_it_chose(
    served: str, grouped: Grouped, dtype: str, transpose: bool
) -> None:
    k = 2 * format_cases.step_of(*grouped)
    packed, decoded = experts(grouped, dtype, k)
    x = rows(5, 1, 1, k if transpose else N, dtype=dtype)

    y = mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN, transpose=transpose)

    decoded = decoded.swapaxes(-1, -2) if transpose else decoded
    expected = oracles.exact(x) @ decoded[np.array(CHOSEN)]
    assert (y.shape, y.dtype) == (expected.shape, x.dtype)
    mode, _, group_size = grouped  # groups of 16 are decoded in float32
    by_stock = served == "stock" and mode == "affine" and group_size != 16
    assert oracles.error(y, expected) < LIMITS[dtype] * (
        STOCK_AFFINE if by_stock else 1
    )


@pytest.mark.usefixtures("served")
def test_rows_are_named_experts_sorted_and_products_of_several_rows() -> None:
    packed, decoded = experts(GROUPS_OF_16)
    chosen, sources = mx.array([0, 1, 1, 3]), mx.array([2, 0, 1, 1], mx.uint32)
    for m in (1, 3):
        x = rows(3, m, K)

        y = mlx_marlin.gather_qmm(x, packed, None, None, sources, chosen)
        again = mlx_marlin.gather_qmm(
            x, packed, None, None, sources, chosen, sorted_indices=True
        )

        weights = decoded[np.array(chosen)].swapaxes(-1, -2)
        expected = oracles.exact(x)[np.array(sources)] @ weights
        assert oracles.error(y, expected) < 1e-5
        assert oracles.error(again, expected) < 1e-5


def test_an_invariant_row_has_the_bits_that_it_has_alone(served: str) -> None:
    packed, _ = experts(GROUPS_OF_16, "float16")
    x = rows(5, 1, 1, K, dtype="float16")
    if served == "stock":
        with pytest.raises(ValueError, match="invariant=True cannot be kept"):
            mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN, invariant=True)
        return

    together = mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN, invariant=True)

    for i in range(5):
        alone = mlx_marlin.gather_qmm(
            x[i : i + 1], packed, rhs_indices=CHOSEN[i : i + 1], invariant=True
        )
        assert mx.array_equal(alone[0], together[i])


@pytest.mark.parametrize("mode", ["affine", "symmetric", "zero_point"])
@pytest.mark.usefixtures("served")
def test_gradients_are_those_of_plain_weights(mode: str) -> None:
    packed, _ = experts((mode, 4, 16))
    x = rows(5, 1, 1, K)

    def ours(x: mx.array, weight: PackedWeight) -> mx.array:
        return mlx_marlin.gather_qmm(x, weight, rhs_indices=CHOSEN)

    def theirs(x: mx.array, weight: PackedWeight) -> mx.array:
        return x @ plain(weight, mx.float32)[CHOSEN].swapaxes(-1, -2)

    found, expected = (
        mx.grad(
            lambda x, s, f=of: f(x, replace(packed, scales=s)).square().sum(), (0, 1)
        )(x, packed.scales)
        for of in (ours, theirs)
    )

    for actual, wanted in zip(found, expected, strict=True):
        assert oracles.error(actual, oracles.exact(wanted)) < 1e-4


@pytest.mark.usefixtures("served")
def test_a_call_that_does_not_fit_raises() -> None:
    packed, _ = experts(GROUPS_OF_16)

    for k in (K // 2, 2 * K):
        with pytest.raises(ValueError, match=r"[Ss]hape"):
            mlx_marlin.gather_qmm(rows(5, 1, 1, k), packed, rhs_indices=CHOSEN)
        with pytest.raises(ValueError, match=r"[Ss]hape|dimension"):
            gather_gated(rows(5, k), packed, packed, CHOSEN)
    with pytest.raises(ValueError, match=r"broadcast"):
        gather_gated(rows(3, K), packed, packed, CHOSEN)
    for other in (experts(("affine", 4, 32))[0], experts(GROUPS_OF_16, k=2 * K)[0]):
        with pytest.raises(ValueError, match="expected as gate"):
            gather_gated(rows(5, K), packed, other, CHOSEN)
