"""Launches the kernels of a decoder block that are no products. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin.backends import kernels, selection
from mlx_marlin.backends.arguments import TemplateValue, float_bits
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.epilogue import Rotation
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

MAX_THREADS = 1024
"""Limit of the threads that add and normalize a row, as in MLX's RMSNorm."""
SIDE = 4
"""Values that such a thread takes side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a joined product of q, k and v, and how q's and k's are rotated.

    Attributes:
        heads: Heads of q.
        kv_heads: Heads of k.
        features: Features of a head.
        columns: Columns of the product.
        norm: RMSNorm epsilon of the heads, or None.
        factor: Factor of rotated heads.
    """

    heads: int
    kv_heads: int
    features: int
    columns: int
    norm: float | None = None
    factor: float = 1.0

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

    def template(self, tokens: int, per_stream: bool) -> dict[str, TemplateValue]:
        """Returns the template arguments of the kernel.

        Args:
            tokens: New tokens of a stream.
            per_stream: Whether each stream has its own position.
        """
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "FEATURES": self.features,
            "COLUMNS": self.columns,
            "TOKENS": tokens,
            "PER_STREAM": per_stream,
            "NORM": self.norm is not None,
            "EPSILON": float_bits(self.norm or 0.0),
            "FACTOR": float_bits(self.factor),
        }


def rotate_heads(
    heads: Heads,
    qkv: mx.array,
    positions: mx.array,
    freqs: mx.array,
    norms: Sequence[mx.array] = (),
) -> tuple[mx.array, mx.array]:
    """Launches the kernel that normalizes and rotates the heads of q and k.

    Args:
        heads: The heads.
        qkv: The joined product [streams, tokens, columns].
        positions: Positions of the first tokens, int32 [streams] or a single one.
        freqs: As `freqs` of `mx.fast.rope`, float32 [features / 2].
        norms: Weights [features] of the norms of q and k, if heads are normalized.

    Returns:
        q and k, each [streams, heads, tokens, features].
    """
    streams, tokens, _ = qkv.shape
    shapes = [
        (streams, count, tokens, heads.features)
        for count in (heads.heads, heads.kv_heads)
    ]
    q_norm, k_norm = norms or (qkv, qkv)  # which are not read
    simdgroups = streams * tokens * (heads.heads + heads.kv_heads)
    per_stream = positions.size > 1
    q, k = selection.active().kernel(block_source("rotate_heads"), 0)(
        inputs=(qkv, positions.reshape(-1), freqs, q_norm, k_norm),
        template=kernels.template(heads.template(tokens, per_stream)),
        grid=(simdgroups * SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        output_shapes=shapes,
        output_dtypes=[qkv.dtype] * 2,
    )
    return q, k


def add_norm(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array]:
    """Launches the kernel that adds rows and normalizes the sums.

    Args:
        x: Summands [..., n].
        y: Summands [..., n].
        weight: Weight [n] of the norm.
        epsilon: Epsilon of the norm.

    Returns:
        The sums, and the normalized sums.
    """
    arguments = norm_template(x.shape[-1], epsilon)
    threads = int(arguments["THREADS"])
    total, normed = selection.active().kernel(block_source("add_norm"), 0)(
        inputs=(x, y, weight),
        template=kernels.template(arguments),
        grid=(prod(x.shape[:-1]) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape] * 2,
        output_dtypes=[x.dtype] * 2,
    )
    return total, normed


def norm_template(n: int, epsilon: float) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel that adds and normalizes rows.

    Args:
        n: Values of a row.
        epsilon: Epsilon of the norm.
    """
    simdgroups = -(-n // (SIDE * SIMD_WIDTH))
    threads = min(simdgroups * SIMD_WIDTH, MAX_THREADS)
    return {"N": n, "THREADS": threads, "EPSILON": float_bits(epsilon)}


def block_source(kernel: str) -> Source:
    """Returns the text of the active back end's kernel.

    Raises:
        ValueError: If the back end has no such kernels.
    """
    backend = selection.active()
    if backend.blocks is None:
        raise ValueError(f"the back end {backend.name!r} has no kernel {kernel!r}")
    return backend.blocks.source(kernel)
