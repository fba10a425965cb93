"""The error model: how far a correct result may be from the exact one.

A correct product of k terms in a dtype with unit roundoff u has three errors, which are
independent, so that their squares add up. All sizes are Frobenius norms.

* Rounding of the result, at most u / sqrt(3) of it: errors are uniform in half a unit
  in the last place, which is at most u of the value. Activations are not rounded: the
  exact product takes them as the layer does.
* Rounding of decoded weights. Our kernels do not round them, but stock MLX may round
  scale * code, and that plus bias, to the dtype: about u / 2 of the *terms*. Terms are
  x * scale * code and x * bias; their norm is that of all their products with x.
* Accumulation in float32, or in the dtype where stock MLX runs on a CPU. Each of k
  additions rounds a partial sum, which is a random walk: 0.3 * sqrt(k) units of the
  terms' norm if the additions are sequential, and 0.25 * sqrt(k) of the result's if all
  terms have the same sign. Our kernels add in parallel, and stay below that.

A limit is 2 to 4 times such an error. It is relative to the sizes of result and terms,
because absolute limits fail results that are rounded correctly: for 4096 weights of
0.02 and activations of 1, perfect float16 results are wrong by up to 0.002.
"""

import math
from dataclasses import dataclass
from typing import Any

ROUNDING = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 2.0**-22}
"""Limit of the relative error of rounding results, by dtype: 3.5, 2.7 and 6.9 times
u / sqrt(3)."""
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Unit roundoff u by dtype."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Absolute error of an element that is below the normal numbers."""
DECODING = 1 / 3
"""Limit of rounding decoded weights, in `ROUNDING` of the terms."""
ACCUMULATION = 0.6
"""Limit of accumulation, in units of the terms, times sqrt(k)."""
FEW = 4.0
"""Factor of the limit of a single output feature, which has few elements: one error may
be several times the rms error."""

MANTISSA_BITS = {"mxfp4": 1, "nvfp4": 1, "mxfp8": 3}
"""Mantissa bits of floating-point codes, by mode."""
SPREAD = 3.0
"""Largest range of a group's weights that is expected, in sqrt(12) of their rms."""

Number = Any
"""A float, or a NumPy array of one number for each output feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a product, or of single output features."""

    # Frobenius norm of the exact result, and of the bias if there is one
    result: Number
    terms: Number  # Norm of all terms that are added, as if they were independent
    count: int  # Number of elements


def product_limit(sizes: Sizes, dtype: str, k: int, sums: str = "float32") -> Number:
    """Returns the limit of the Frobenius norm of a product's error."""
    rounded = ROUNDING[dtype] ** 2
    added = (ACCUMULATION * UNIT[sums]) ** 2 * k
    squares = rounded * (sizes.result**2 + (DECODING * sizes.terms) ** 2)
    squares = squares + added * (sizes.result**2 + sizes.terms**2)
    return (squares + sizes.count * SMALLEST[dtype] ** 2) ** 0.5


def quantization_limit(mode: str, bits: int) -> float:
    """Returns the limit of the relative error of weights that were quantized.

    Rounding to integers of b bits has an rms error of a step / sqrt(12), and a step is
    range / (2^b - 1). The limit is for weights whose range in a group is 3 * sqrt(12),
    10.4 times their rms; that of 128 normally distributed weights is 5.4 times. Codes
    with m mantissa bits round by at most 2^-(m + 1) of a weight.
    """
    if mode in MANTISSA_BITS:
        return math.ldexp(1, -MANTISSA_BITS[mode] - 1)
    return SPREAD / ((1 << bits) - 1)
