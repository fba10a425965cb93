"""The epilogue: operations that a kernel applies to a product before storing it."""

import math
from dataclasses import dataclass

ACTIVATIONS = ("none", "silu", "gelu", "gelu_approx")
"""Elementwise activations; the names are those of `mlx.nn`."""
MOST_PARTS = 6
"""Largest number of weights that share x in one product: their offsets and the end fit
in an array of fewer than eight elements, which MLX passes to Metal as a constant."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of attention heads, with an optional RMSNorm before.

    As in `mx.fast.rope(..., traditional=False)`, features i and i + features / 2 of a
    head are rotated together, by the angle position / freqs[i]. Positions and `freqs`
    are arrays of the call. Each row is the next token of a sequence.
    """

    features: int  # Columns of a head
    columns: int  # Columns of the rotated heads, which come first
    # Whether each row has its own position; otherwise all rows share one
    per_row: bool = False
    # RMSNorm epsilon of the rotated heads, or None. The weights [features] are arrays
    # of the call
    norm: float | None = None
    # Columns of the heads of q, to which the first of the two RMSNorm weights applies;
    # the second one applies to the heads of k
    queries: int = 0
    factor: float = 1.0  # Scale of the rotated heads, as in YaRN

    def explain(self) -> str:
        """Returns a description of the rotation."""
        text = f"rotated in heads of {self.features} up to column {self.columns}"
        text += "" if self.factor == 1 else f", times {self.factor:g}"
        if self.norm is None:
            return text
        return f"{text}, normalized before (eps {self.norm:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a joined product of q, k and v, and how q's and k's are rotated."""

    heads: int  # Heads of q
    kv_heads: int  # Heads of k
    features: int  # Features of a head
    columns: int  # Columns of the product
    norm: float | None = None  # RMSNorm epsilon of the heads, or None
    factor: float = 1.0  # Factor of rotated heads

    @property
    def rotated_columns(self) -> int:
        """Columns of q and k, which come first."""
        return (self.heads + self.kv_heads) * self.features

    @property
    def rotation(self) -> Rotation:
        """The same as the epilogue of a product, for rows that have positions."""
        queries = 0 if self.norm is None else self.heads * self.features
        return Rotation(
            self.features,
            self.rotated_columns,
            per_row=True,
            norm=self.norm,
            queries=queries,
            factor=self.factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """Operations on a product before it is stored, in float32 and in this order.

    `activation(product + bias) * multiplier + residual`

    Weights that share x are concatenated along their rows. `parts` stores the result of
    each weight as an array of its own. `gated` stores
    `activation(first half) * second half`. `rotation` rotates heads after the bias;
    results then have the shape [m, heads, 1, features].

    Attributes:
        bias: Whether a bias [n] is added.
        activation: One of `ACTIVATIONS`.
        multiply: Whether the result is multiplied by an array [m, n].
        residual: Whether an array [m, n] is added last.
        parts: Columns of each result; empty for a single result.
        gated: Whether the first half of the columns gates the second; the result is
            [m, n / 2].
        rotation: The rotation of heads, or None.
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
        sizes = columns, rotation.queries, *self.parts
        if not even or any(size % features for size in sizes):
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

    def check_product(self, n: int, batch: int) -> None:
        """Raises ValueError if a product with n columns cannot have this epilogue."""
        if self.parts and (sum(self.parts) != n or batch > 1):
            raise ValueError(
                f"parts={self.parts} do not add up to n={n} of one product, got "
                f"batch={batch}"
            )
        rotation = self.rotation
        if rotation is not None and (
            n % rotation.features or rotation.columns > n or batch > 1
        ):
            raise ValueError(
                f"rotation={rotation} needs one product of whole heads, got "
                f"n={n}, batch={batch}"
            )
        if self.gated and (n % 2 or batch > 1):
            raise ValueError(
                f"gated=True needs one product with an even n, got n={n}, batch={batch}"
            )

    @property
    def is_paired(self) -> bool:
        """Whether results depend on a pair of the product's columns."""
        return self.gated or self.rotation is not None

    @property
    def operands(self) -> int:
        """Number of operands that have the shape of the result."""
        return self.multiply + self.residual

    def explain(self) -> str:
        """Returns the epilogue as a formula; empty if there is none."""
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
"""No epilogue."""
