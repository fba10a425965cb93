"""Whether two generations have the same tokens, up to ties of stock MLX's logits."""

from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.decoding import Prompts, Tokens

ULPS = 8
"""How many units in the last place of the largest logit two logits of a tie differ by
at most: logits are sums that each kernel rounds in its own way."""
LEAST_PRECISION = 2.0**-16
"""Smallest unit: in float32, the order of a sum changes more than its last bit."""


def difference(
    stock: nn.Module, prompts: Prompts, expected: Tokens, actual: Tokens
) -> str | None:
    """Returns how tokens differ from stock MLX's, or None if only at ties.

    A stream counts until its first other token, because everything after it has
    another beginning.
    """
    for stream, prompt in enumerate(prompts):
        pairs = zip(expected, actual, strict=True)
        both = [(own[stream], other[stream]) for own, other in pairs]
        step = next((i for i, (own, other) in enumerate(both) if own != other), None)
        if step is None:
            continue
        before = [own for own, _ in both[:step]]
        gap, limit = _gap(stock, [*prompt, *before], *both[step])
        if not gap <= limit:
            return (
                f"token {step + 1} of stream {stream + 1} differs from stock MLX's, "
                f"whose logits are {gap:.3g} apart, more than rounding ({limit:.3g})"
            )
    return None


def _gap(
    stock: nn.Module, tokens: list[int], own: int, other: int
) -> tuple[float, float]:
    """Returns how far the logits of two tokens are apart, and the limit of a tie."""
    found = stock(mx.array([tokens]))[0, -1]
    precision = max(mx.finfo(found.dtype).eps, LEAST_PRECISION)
    logits = found.astype(mx.float32)
    numbers = [mx.max(mx.abs(logits)), logits[own] - logits[other]]
    largest, gap = (cast(float, each.item()) for each in numbers)
    return abs(gap), ULPS * float(precision) * largest
