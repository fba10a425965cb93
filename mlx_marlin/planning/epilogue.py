"""What happens to a product before it is stored."""

import math
from dataclasses import dataclass

ACTIVATIONS = ("none", "silu", "gelu", "gelu_approx")
"""What an epilogue can do to each value; the names are those of `mlx.nn`."""
MOST_PARTS = 6
"""Weights that share x in one product: where each begins, and the end, stand in an
array of fewer than eight elements, which Metal hands over as a constant."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Heads that are rotated by their place, as rotary embeddings do.

    Features i and i + features / 2 of a head are a point, which is turned by its row's
    place divided by `periods[i]`, an array beside: the places that make a radian, what
    `mx.fast.rope(..., traditional=False)` calls `freqs`. Rows are streams' next tokens.

    Attributes:
        features: Columns of a head.
        columns: Columns of all heads that are rotated, the first ones.
        each: Whether each row has a place of its own, or one is that of all rows.
        norm: What is added to the mean square of each of these heads, which is divided
            by the root of that and multiplied by a weight [features] before, as by
            MLX's `rms_norm`; None if heads are rotated as they are.
        queries: Columns of the heads that the first of two such weights is for, those
            of q; the second one is for the others.
        factor: What rotated heads are multiplied by, as in YaRN.
    """

    features: int
    columns: int
    each: bool = False
    norm: float | None = None
    queries: int = 0
    factor: float = 1.0

    def explain(self) -> str:
        """Says what happens to a product."""
        text = f"rotated in heads of {self.features} up to column {self.columns}"
        text += "" if self.factor == 1 else f", times {self.factor:g}"
        if self.norm is None:
            return text
        return f"{text}, normalized before (eps {self.norm:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to a product before it is stored, in float32, in this order.

    `activation(product + bias) * multiplier + residual`

    Several weights with the same x are one weight with all their rows; `parts` then
    stores each one's result as an array of its own, one after the other. Of two whose
    results are multiplied, `gated` stores the activation of the first one's times the
    second one's. Of weights whose results are heads, `rotation` rotates them, after the
    bias, and results are [m, heads, 1, features].

    Attributes:
        bias: Whether a bias [n] is added.
        activation: One of `ACTIVATIONS`.
        multiply: Whether the result is multiplied by an array [m, n].
        residual: Whether an array [m, n] is added at last.
        parts: Columns of each of several results; none where there is only one.
        gated: Whether the first half of the columns gates the second, [m, n / 2].
        rotation: How heads are rotated, if they are.
    """

    bias: bool = False
    activation: str = "none"
    multiply: bool = False
    residual: bool = False
    parts: tuple[int, ...] = ()
    gated: bool = False
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} is not one of {ACTIVATIONS}"
            )
        if self.gated and (self.bias or self.operands or self.parts):
            raise ValueError(
                f"gated=True has an activation only, got bias={self.bias}, "
                f"multiply={self.multiply}, residual={self.residual}, "
                f"parts={self.parts}"
            )
        if self.rotation is not None:
            self._check_rotation(self.rotation)
        if not self.parts:
            return
        if not 2 <= len(self.parts) <= MOST_PARTS or min(self.parts) < 1:
            raise ValueError(
                f"parts={self.parts} are not 2 to {MOST_PARTS} numbers of columns"
            )
        if self.operands:
            raise ValueError(
                f"parts={self.parts} have no multiplier and no residual, got "
                f"multiply={self.multiply}, residual={self.residual}"
            )

    def _check_rotation(self, rotation: Rotation) -> None:
        if self.gated or self.operands or self.activation != "none":
            raise ValueError(
                f"rotation={rotation} follows a bias only, got gated={self.gated}, "
                f"activation={self.activation!r}, multiply={self.multiply}, "
                f"residual={self.residual}"
            )
        features, columns = rotation.features, rotation.columns
        even = features >= 2 and features % 2 == 0 and columns >= 0
        whole = columns, rotation.queries, *self.parts
        if not even or any(each % features for each in whole):
            raise ValueError(
                f"rotation={rotation} needs heads of an even number of features, and "
                f"columns, queries and parts of whole heads, got parts={self.parts}"
            )
        if not 0 < rotation.factor < math.inf:
            raise ValueError(f"rotation={rotation} needs a positive, finite factor")
        normed = rotation.norm is not None
        if not 0 <= rotation.queries <= columns * normed or (rotation.norm or 0) < 0:
            raise ValueError(
                f"rotation={rotation} needs a norm of at least 0, and queries within "
                f"its columns; without a norm there are none"
            )

    @property
    def is_paired(self) -> bool:
        """Whether two columns of the product make a result, or two, together."""
        return self.gated or self.rotation is not None

    @property
    def operands(self) -> int:
        """Arrays of the result's shape that are read."""
        return self.multiply + self.residual

    def explain(self) -> str:
        """Says the epilogue as a formula; empty if there is none."""
        if self.gated:
            gate = "gate" if self.activation == "none" else f"{self.activation}(gate)"
            return f"{gate} * up"
        text = "y + bias" if self.bias else "y"
        text = text if self.activation == "none" else f"{self.activation}({text})"
        text = f"({text})" if self.multiply and text == "y + bias" else text
        text += " * multiply" * self.multiply + " + residual" * self.residual
        if self.rotation is not None:
            text += f" {self.rotation.explain()}"
        parts = f" in parts of {', '.join(map(str, self.parts))}" * bool(self.parts)
        return "" if text + parts == "y" else text + parts


PLAIN = Epilogue()
"""Nothing happens to the product."""
