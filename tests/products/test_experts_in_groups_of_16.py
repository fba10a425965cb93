"""Experts of integers in groups of 16, which stock MLX does not have."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.products.packing import pack
from mlx_marlin.products.reference.weight import plain
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.choose import Choose
from support.profiles import sampled

EXPERTS, N, K = 4, 40, 128
FORMATS = [("affine", 4), ("affine", 3), ("symmetric", 8), ("zero_point", 5)]
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}
CHOSEN = mx.array([[3, 0], [1, 1], [2, 3], [0, 2], [1, 3]], mx.uint32)

formats = pytest.mark.parametrize(("mode", "bits"), FORMATS)


def experts(mode: str, bits: int, dtype: str) -> tuple[PackedWeight, oracles.Floats]:
    """Makes packed experts, and what they stand for in float64."""
    weight = format_cases.any_weight(
        mode, bits, 16, EXPERTS * N, K, dtype=dtype, seed=bits
    )
    native = [each.reshape(EXPERTS, N, -1) for each in weight.native]
    return pack(*native, **weight.options), weight.decoded.reshape(EXPERTS, N, K)


def rows(*shape: int, dtype: str = "float32") -> mx.array:
    x = mx.random.normal(shape, key=mx.random.key(sum(shape)))
    return x.astype(getattr(mx, dtype))


@pytest.fixture(params=["kernels", "stock"])
def served_by(request: pytest.FixtureRequest, backend: Choose) -> str:
    """Serves every call by the kernels, then by stock MLX."""
    if request.param == "stock":
        backend("stock")
    else:
        request.getfixturevalue("kernels")
    return str(request.param)


@sampled(3, 12)
@formats
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.usefixtures("served_by")
def test_every_row_meets_the_expert_that_it_chose(
    mode: str, bits: int, dtype: str
) -> None:
    packed, decoded = experts(mode, bits, dtype)
    x = rows(5, 1, 1, K, dtype=dtype)

    y = mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN)

    assert (y.shape, y.dtype) == ((5, 2, 1, N), x.dtype)
    expected = oracles.exact(x) @ decoded[np.array(CHOSEN)].swapaxes(-1, -2)
    assert oracles.error(y, expected) < LIMITS[dtype]


@pytest.mark.usefixtures("served_by")
def test_rows_are_named_experts_sorted_and_products_of_several_rows() -> None:
    packed, decoded = experts("affine", 4, "float32")
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


@formats
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.usefixtures("served_by")
def test_weights_as_they_are(mode: str, bits: int, dtype: str) -> None:
    packed, decoded = experts(mode, bits, dtype)
    x = rows(5, 1, 1, N, dtype=dtype)

    y = mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN, transpose=False)

    assert (y.shape, y.dtype) == ((5, 2, 1, K), x.dtype)
    expected = oracles.exact(x) @ decoded[np.array(CHOSEN)]
    assert oracles.error(y, expected) < LIMITS[dtype]


@pytest.mark.usefixtures("kernels")
def test_an_invariant_row_has_the_bits_that_it_has_alone() -> None:
    packed, _ = experts("affine", 4, "float16")
    x = rows(5, 1, 1, K, dtype="float16")

    together = mlx_marlin.gather_qmm(x, packed, rhs_indices=CHOSEN, invariant=True)

    for i in range(5):
        alone = mlx_marlin.gather_qmm(
            x[i : i + 1], packed, rhs_indices=CHOSEN[i : i + 1], invariant=True
        )
        assert mx.array_equal(alone[0], together[i])


def test_stock_cannot_be_invariant(backend: Choose) -> None:
    packed, _ = experts("affine", 4, "float16")
    backend("stock")

    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        mlx_marlin.gather_qmm(
            rows(5, 1, 1, K), packed, rhs_indices=CHOSEN, invariant=True
        )


@pytest.mark.parametrize("mode", ["affine", "symmetric", "zero_point"])
@pytest.mark.usefixtures("served_by")
def test_gradients_are_those_of_plain_weights(mode: str) -> None:
    packed, _ = experts(mode, 4, "float32")
    x = rows(5, 1, 1, K)

    def ours(x: mx.array, scales: mx.array) -> mx.array:
        weight = PackedWeight(
            words=packed.words, scales=scales, n=N, k=K, group_size=16, mode=mode
        )
        return mlx_marlin.gather_qmm(x, weight, rhs_indices=CHOSEN).square().sum()

    def theirs(x: mx.array, scales: mx.array) -> mx.array:
        weight = PackedWeight(
            words=packed.words, scales=scales, n=N, k=K, group_size=16, mode=mode
        )
        w = plain(weight, mx.float32)[CHOSEN]
        return (x @ w.swapaxes(-1, -2)).square().sum()

    found = mx.grad(ours, argnums=(0, 1))(x, packed.scales)

    expected = mx.grad(theirs, argnums=(0, 1))(x, packed.scales)
    for actual, wanted in zip(found, expected, strict=True):
        assert oracles.error(actual, oracles.exact(wanted)) < 1e-4


@pytest.mark.usefixtures("served_by")
def test_a_call_that_does_not_fit_raises() -> None:
    packed, _ = experts("affine", 4, "float32")

    with pytest.raises(ValueError, match=r"[Ss]hape"):
        mlx_marlin.gather_qmm(rows(5, 1, 1, K // 2), packed, rhs_indices=CHOSEN)
