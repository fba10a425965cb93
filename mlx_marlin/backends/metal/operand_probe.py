"""Known answers of one 8x8 product whose operands have the types of a form of codes.

The products of all lanes and elements are compared exactly. Significands are odd and
exponents beyond those of a half, so that a number that is truncated, rounded, flushed
or converted to another type gives another product.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.launch import Launch, Output, inputs_of
from mlx_marlin.backends.metal import source
from mlx_marlin.backends.metal.operands import OPERANDS
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH

PAIRS = {"bfloat": "bfloat by bfloat", "half_by_float": "half by float"}
"""The types of operands of forms that are probed."""


def probe(operand: CodeForm) -> Probe:
    """Returns the probe of a form of codes, one of `operands.PROBED`."""
    text = source.kernel_source("operand_probe")
    launch = Launch(
        source=text,
        template=(("OPERAND", OPERANDS.index(operand)),),
        inputs=inputs_of(text, {"unused": "float32"}),
        grid=(FRAGMENT * SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=(Output("out", "float32", (FRAGMENT**3,), None),),
    )
    return Probe(launch=launch, fault=partial(_fault, operand))


def _fault(operand: CodeForm, values: Sequence[float]) -> str | None:
    indices = product(range(FRAGMENT), repeat=3)
    for (k, n, m), expected, value in zip(
        indices, products(operand), values, strict=True
    ):
        if value != expected:
            return (
                f"the product of {PAIRS[operand]} gives {value:g} for n={n}, k={k}, "
                f"m={m}, expected {expected:g}"
            )
    return None


def products(operand: CodeForm) -> Iterator[float]:
    """Yields the known products, by k, row of w and row of x."""
    for k, n, m in product(range(FRAGMENT), repeat=3):
        odd = 2 * (FRAGMENT * n + k) + 1
        code = 16 + odd / 8 if operand == "bfloat" else 256 + odd / 4
        significand = 128 + 2 * (FRAGMENT * k + m) + 1
        yield code * significand * 2.0 ** (25 * k - 107)
