"""Error of a product by the offset of its codes, against a float32 product.

    python -m benchmarks.offset_error

NumPy adds in the order of `gemm_register`: the products of a group after -offset *
sum(x), then scale and bias once a group. The yardstick adds products of the decoded
weight in float32. Errors are the largest of max|y|, over all kinds of x and seeds.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS, K, GROUP = 4, 32, 4096, 64
SEEDS = range(6)
OFFSETS = (0, 16, 64)
Floats = NDArray[np.float32]
Draw = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]


def _alternating(
    draw: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.float64]:
    signs = np.where(np.arange(shape[1]) % 2, 1, -1)
    return signs * (1 + 0.01 * draw.standard_normal(shape))


KINDS: dict[str, Draw] = {
    "normal": lambda draw, shape: draw.standard_normal(shape),
    "positive": lambda draw, shape: np.abs(draw.standard_normal(shape)),
    "constant": lambda draw, shape: np.full(shape, 0.37),
    "shifted": lambda draw, shape: draw.standard_normal(shape) + 8,
    "outliers": lambda draw, shape: (
        draw.standard_normal(shape) * np.where(draw.random(shape) < 0.01, 100, 1)
    ),
    "log-normal": lambda draw, shape: np.exp(2 * draw.standard_normal(shape)),
    "alternating": _alternating,
}


def narrowed(x: NDArray[Any], dtype: str) -> Floats:
    """Returns values of a dtype as float32; bfloat16 by truncation."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    words = x.astype(np.float32).view(np.uint32)
    return (words & np.uint32(0xFFFF0000)).view(np.float32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """Returns a * b + c, rounded once but for the sum in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def product(
    x: Floats, codes: Floats, scales: Floats, biases: Floats, offset: int
) -> Floats:
    """Returns x [m, k] times a weight: codes [n, k], scales and biases [n, k / 64]."""
    totals = np.zeros((len(x), len(codes)), np.float32)
    for group in range(x.shape[1] // GROUP):
        inside = slice(group * GROUP, (group + 1) * GROUP)
        values, with_offset = x[:, inside], codes[:, inside] + np.float32(offset)
        sums = np.zeros((len(x), 1), np.float32)
        for k in range(GROUP):
            sums += values[:, k : k + 1]
        products = np.repeat(np.float32(-offset) * sums, len(codes), axis=1)
        for k in range(GROUP):
            products = fma(values[:, k : k + 1], with_offset[:, k], products)
        totals = fma(sums, biases[:, group], totals)
        totals = fma(products, scales[:, group], totals)
    return totals


def yardstick(x: Floats, w: Floats) -> Floats:
    """Returns x times the transpose of w, added in float32."""
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        total = fma(x[:, k : k + 1], w[:, k], total)
    return total


def errors(kind: str, dtype: str, seed: int) -> dict[str, float]:
    """Returns the error of each offset and of the yardstick, of max|y|."""
    draw = np.random.default_rng(seed)
    x = narrowed(KINDS[kind](draw, (ROWS, K)), dtype)
    codes = draw.integers(0, 16, (COLUMNS, K)).astype(np.float32)
    scales = narrowed(draw.random((COLUMNS, K // GROUP)) * 0.01 + 0.005, dtype)
    biases = narrowed(-8 * scales + 0.001 * draw.standard_normal(scales.shape), dtype)
    scale, bias = (
        np.repeat(each.astype(np.float64), GROUP, axis=1) for each in (scales, biases)
    )
    w = scale * codes + bias
    expected = x.astype(np.float64) @ w.T
    results = {"float32 product": yardstick(x, w.astype(np.float32))}
    for offset in OFFSETS:
        name = f"offset {offset}" if offset else "exact codes"
        results[name] = product(x, codes, scales, biases, offset)
    most = np.abs(expected).max()
    return {name: np.abs(y - expected).max() / most for name, y in results.items()}


def main() -> None:
    """Prints the largest errors of each dtype."""
    for dtype in ("float16", "bfloat16"):
        worst: dict[str, float] = {}
        for kind in KINDS:
            for seed in SEEDS:
                for name, error in errors(kind, dtype, seed).items():
                    worst[name] = max(worst.get(name, 0.0), error)
        print(
            dtype, *(f"{name} {error:.1e}" for name, error in worst.items()), sep=", "
        )


if __name__ == "__main__":
    main()
