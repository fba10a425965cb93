"""Launches the kernels of a decoder block that are no products. It decides nothing."""

from collections.abc import Sequence
from math import prod

import mlx.core as mx

from mlx_marlin.backends import kernels, selection
from mlx_marlin.backends.arguments import TemplateValue, float_bits
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.launches import norm_threadgroup
from mlx_marlin.planning.work.tiles import SIMD_WIDTH


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
        template=kernels.template(heads_template(heads, tokens, per_stream)),
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


def heads_template(
    heads: Heads, tokens: int, per_stream: bool
) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel that rotates heads.

    Args:
        heads: The heads.
        tokens: New tokens of a stream.
        per_stream: Whether each stream has its own position.
    """
    return {
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "FEATURES": heads.features,
        "COLUMNS": heads.columns,
        "TOKENS": tokens,
        "PER_STREAM": per_stream,
        "NORM": heads.norm is not None,
        "EPSILON": float_bits(heads.norm or 0.0),
        "FACTOR": float_bits(heads.factor),
    }


def norm_template(n: int, epsilon: float) -> dict[str, TemplateValue]:
    """Returns the template arguments of the kernel that adds and normalizes rows.

    Args:
        n: Values of a row.
        epsilon: Epsilon of the norm.
    """
    threads = norm_threadgroup(n)
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
