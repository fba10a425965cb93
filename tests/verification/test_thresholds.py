"""The error model covers correct sums in float32, and catches ten times their error."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin.lm.verification import inputs
from mlx_marlin.lm.verification.comparison import WeightComparison
from mlx_marlin.lm.verification.layers import Rows
from mlx_marlin.lm.verification.thresholds import (
    FEW,
    ROUNDING,
    SMALLEST,
    UNIT,
    Sizes,
    product_limit,
    quantization_limit,
)
from support import format_cases, oracles
from support.profiles import drawn

FEATURES = 16


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds float32 to a dtype, with NumPy alone."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    if dtype == "float32":
        return values.astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return (((bits + 0x7FFF + even) >> 16) << 16).view(np.float32).astype(np.float64)


class Product:
    """A product with affine weights: exactly, and as float32 adds it one by one."""

    def __init__(
        self,
        seed: int,
        k: int,
        bits: int,
        dtype: str,
        shift: float = 0.0,
        *,
        rows: int = 8,
        decoding: str = "float32",
    ) -> None:
        draw = np.random.default_rng(seed)
        x = draw.standard_normal((rows, k)) + shift
        self.x = rounded(x.astype(np.float32), dtype)
        codes = draw.integers(0, 2**bits, (FEATURES, k)).astype(float)
        scale = (draw.uniform(0.5, 1, (FEATURES, 1)) / 2**bits).astype(np.float32)
        bias = (-scale * (2**bits - 1) / 2).astype(np.float32)
        scaled = scale.astype(float) * codes
        self.exact = self.x @ (scaled + bias).T
        self.terms = (self.x**2) @ (scaled**2 + bias.astype(float) ** 2).T
        w = rounded(scale * codes.astype(np.float32), decoding) + bias
        w = rounded(w.astype(np.float32), decoding).astype(np.float32)
        steps = self.x.astype(np.float32)[:, None] * w
        self.result = rounded(np.add.accumulate(steps, axis=-1)[..., -1], dtype)
        self.dtype, self.k = dtype, k

    def limit(self) -> float:
        sizes = Sizes(
            result=np.linalg.norm(self.exact),
            terms=np.sqrt(self.terms.sum()),
            count=self.exact.size,
        )
        return float(product_limit(sizes, self.dtype, self.k))

    def feature_limits(self) -> np.ndarray:
        sizes = Sizes(
            result=np.linalg.norm(self.exact, axis=0),
            terms=np.sqrt(self.terms.sum(0)),
            count=len(self.x),
        )
        return FEW * np.asarray(product_limit(sizes, self.dtype, self.k))


@drawn(
    20,
    seed=st.integers(0, 2**20),
    k=st.sampled_from([32, 64, 96, 320, 1024, 4128, 16384]),
    bits=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from([*ROUNDING]),
    shift=st.sampled_from([0.0, 0.5, 8.0]),
)
def test_a_sequential_sum_is_within_the_limit_and_ten_times_its_error_is_not(
    seed: int, k: int, bits: int, dtype: str, shift: float
) -> None:
    product = Product(seed, k, bits, dtype, shift)
    error = product.result - product.exact

    assert np.linalg.norm(error) <= product.limit()
    assert np.all(np.linalg.norm(error, axis=0) <= product.feature_limits())
    if shift == 0:  # else x hides errors behind a sum that cancels
        assert np.linalg.norm(10 * error) > product.limit()


@drawn(
    20,
    seed=st.integers(0, 2**20),
    k=st.sampled_from([64, 512, 4096]),
    dtype=st.sampled_from([*ROUNDING]),
)
def test_weights_that_stock_mlx_rounds_are_within_the_limits(
    seed: int, k: int, dtype: str
) -> None:
    product = Product(seed, k, 4, dtype, rows=1, decoding=dtype)
    error = product.result - product.exact

    assert np.all(np.abs(error[0]) <= product.feature_limits())
    assert np.linalg.norm(error) <= product.limit()


@drawn(
    20,
    seed=st.integers(0, 2**20),
    k=st.integers(1, 256).map(lambda count: 32 * count),
    dtype=st.sampled_from([*ROUNDING]),
)
def test_a_feature_that_is_a_percent_off_is_found_in_few_rows(
    seed: int, k: int, dtype: str
) -> None:
    """In bfloat16 it has to be five percent off."""
    product = Product(seed, k, 4, dtype)
    factor = 1.05 if dtype == "bfloat16" else 1.01
    wrong = np.abs(product.result * factor - product.exact)

    found = np.linalg.norm(wrong, axis=0) > product.feature_limits()
    large = np.linalg.norm(product.exact, axis=0) > np.sqrt(product.terms.sum(0)) / 3
    assert np.all(found[large])


def test_the_limits_are_those_that_the_kernels_promise() -> None:
    promised = oracles.TOLERANCES
    assert {name: ROUNDING[name] for name in ("float16", "bfloat16")} == {
        name: promised[name] for name in ("float16", "bfloat16")
    }
    assert ROUNDING["float32"] < promised["float32"]


@pytest.mark.parametrize(
    ("dtype", "times"), [("float16", 3.5), ("bfloat16", 2.7), ("float32", 6.9)]
)
def test_limits_are_so_many_times_a_rounding(dtype: str, times: float) -> None:
    unit = mx.finfo(getattr(mx, dtype)).eps / 2

    assert UNIT[dtype] == unit
    # Subnormal numbers of float16 count; on a GPU those of the others may be zero.
    assert SMALLEST[dtype] == (2.0**-24 if dtype == "float16" else 2.0**-126)
    assert ROUNDING[dtype] == pytest.approx(times * unit / 3**0.5, rel=0.02)


def test_results_below_the_normal_numbers_may_be_rounded_to_zero() -> None:
    sizes = Sizes(result=1e-9, terms=1e-9, count=4)
    assert product_limit(sizes, "float16", 64) > 1e-9
    assert product_limit(sizes, "float32", 64) < 1e-15


def test_sums_in_sixteen_bits_may_err_more() -> None:
    sizes = Sizes(result=1.0, terms=1.0, count=256)
    in_float32 = product_limit(sizes, "float16", 4096)
    assert product_limit(sizes, "float16", 4096, "float16") > 10 * in_float32


@pytest.mark.parametrize(("mode", "bits", "group_size"), format_cases.OF_MLX)
def test_mlxs_quantizer_stays_within_the_limit_of_a_format(
    mode: str, bits: int, group_size: int
) -> None:
    draw = np.random.default_rng(bits)
    w = mx.array(draw.standard_normal((64, 512)).astype(np.float32))
    native = tuple(mx.quantize(w, group_size, bits, mode))
    weight = format_cases.Weight(mode, bits, group_size, native)
    exact = oracles.exact(w)
    error = np.linalg.norm(weight.decoded - exact) / np.linalg.norm(exact)
    limit = quantization_limit(mode, bits)
    assert limit / 5 < error < limit


@pytest.mark.parametrize("size", [1.0, 3.0])
@pytest.mark.parametrize("bits", [4, None])  # None: the source's own codes
def test_weights_are_compared_row_by_row_and_in_all(
    size: float, bits: int | None
) -> None:
    own, plain = (
        SimpleNamespace(description=name, rounding=1e-3, format=format)
        for name, format in (("own", bits and ("affine", bits, 64)), ("plain", None))
    )
    comparison = WeightComparison(own, plain)  # type: ignore[arg-type]
    for matrix, start in ((0, 0), (11, 2)):
        source = np.full((2, 8), size)
        other = source.copy()
        other[1] *= 1.1 if bits else 1.0001
        other[1, 3] = np.nan
        chunk = matrix, slice(start, start + 2)
        comparison.add(*(Rows(*chunk, *[each] * 3) for each in (other, source)))

    found = comparison.report()

    assert comparison.rms_limit == pytest.approx(size * 3 / 15 if bits else 0)
    first = (0, 1) if bits else (0, 1, 3)
    assert (found.wrong, found.first_wrong, found.source) == (2, first, "plain")


def test_experts_are_named_by_place_or_by_keyword() -> None:
    layer: Any = SimpleNamespace(operation="experts", heads=1)
    x, indices = mx.arange(8.0).reshape(2, 1, 1, 4), mx.array([[0, 11], [3, 3]])
    for args, options in (((indices,), {}), ((), {"indices": indices})):
        found = inputs._rows(layer, x, args, options)
        assert found is not None
        assert found.matrices.tolist() == [0, 11, 3, 3]
        assert found.x.tolist() == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
