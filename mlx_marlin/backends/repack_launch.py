"""Launches the kernels that move codes between layouts. It decides nothing."""

import math
from collections.abc import Callable

import mlx.core as mx

from mlx_marlin.backends import kernels, selection
from mlx_marlin.backends.base import Repack
from mlx_marlin.weights import layout

REPACK_THREADS = 256
"""Threads of a threadgroup, which moves some tiles of a weight."""


def repack_kernels() -> Repack:
    """Returns the active back end's kernels that move codes.

    Raises:
        ValueError: If the back end has none.
    """
    backend = selection.active()
    if backend.repack is None:
        raise ValueError(f"the back end {backend.name!r} has no repack kernels")
    return backend.repack


def repack(
    to: str, *, n: int, k: int, bits: int, group_size: int
) -> Callable[[mx.array], mx.array]:
    """Builds the call that moves codes from one layout to the other.

    Args:
        to: The layout of the result, "mlx" or "marlin".
        n: Rows of a weight.
        k: Columns of a weight.
        bits: Bits of a code.
        group_size: Weights along k that share a scale.

    Returns:
        A function between the codes of a weight or a batch in the two layouts, uint32
        [..., n, k * bits / 32] and [..., n tiles, k tiles, words].
    """
    texts = repack_kernels()
    kernel = selection.active().kernel(texts.source(to), 0)
    arguments = texts.template(bits, layout.order_of_group(group_size))
    template = kernels.template(arguments)
    n_tiles, k_tiles = (-(-n // layout.TILE_N), -(-k // layout.TILE_K))
    native = (n, k * bits // 32)
    packed = (n_tiles, k_tiles, layout.tile_words(bits))
    own, result = (native, packed) if to == "marlin" else (packed, native)
    threads = REPACK_THREADS * -(-k_tiles // int(arguments["TILES"]))
    shape = mx.array((n, k), mx.int32)

    def move(w: mx.array) -> mx.array:
        batch = w.shape[: w.ndim - len(own)]
        return kernel(
            inputs=(kernels.readable(w), shape),
            template=template,
            grid=(threads, n_tiles, math.prod(batch)),
            threadgroup=(REPACK_THREADS, 1, 1),
            output_shapes=((*batch, *result),),
            output_dtypes=(mx.uint32,),
        )[0]

    return move
