"""What happens to a product before it is stored."""

from dataclasses import dataclass

ACTIVATIONS = ("none", "silu", "gelu", "gelu_approx")
"""What an epilogue can do to each value; the names are those of `mlx.nn`."""
MOST_PARTS = 6
"""Weights that share x in one product: where each begins, and the end, stand in an
array of fewer than eight elements, which Metal hands over as a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to a product before it is stored, in float32, in this order.

    `activation(product + bias) * multiplier + residual`

    Several weights with the same x are one weight with all their rows; `parts` then
    stores each one's result as an array of its own, one after the other. Of two whose
    results are multiplied, `gated` stores the activation of the first one's times the
    second one's.

    Attributes:
        bias: Whether a bias [n] is added.
        activation: One of `ACTIVATIONS`.
        multiply: Whether the result is multiplied by an array [m, n].
        residual: Whether an array [m, n] is added at last.
        parts: Columns of each of several results; none where there is only one.
        gated: Whether the first half of the columns gates the second, [m, n / 2].
    """

    bias: bool = False
    activation: str = "none"
    multiply: bool = False
    residual: bool = False
    parts: tuple[int, ...] = ()
    gated: bool = False

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
        parts = f" in parts of {', '.join(map(str, self.parts))}" * bool(self.parts)
        return "" if text + parts == "y" else text + parts


PLAIN = Epilogue()
"""Nothing happens to the product."""
