"""Runs the kernels that move codes between layouts. It decides nothing."""

import math
from collections.abc import Callable

import mlx.core as mx

from mlx_marlin.backends import kernels
from mlx_marlin.backends.metal import arguments, source
from mlx_marlin.weights import layout

REPACK_THREADS = 256
"""Threads that move some tiles of a weight."""


def repack(
    to: str, *, n: int, k: int, bits: int, group_size: int
) -> Callable[[mx.array], mx.array]:
    """Builds the call that moves codes from a layout to the other.

    Args:
        to: The layout that they come to, "mlx" or "marlin".
        n: Rows of a weight.
        k: Columns of a weight.
        bits: Bits of a code.
        group_size: Weights along k that share a scale.

    Returns:
        A function from the codes of one weight or a batch, uint32 [..., n,
        k * bits / 32] or [..., n tiles, k tiles, words], to the other of these.
    """
    kernel = kernels.kernel(source.repack_source(to))
    template = kernels.template(
        arguments.repack_template(bits, layout.order_of_group(group_size))
    )
    n_tiles, k_tiles = (-(-n // layout.TILE_N), -(-k // layout.TILE_K))
    native = (n, k * bits // 32)
    packed = (n_tiles, k_tiles, layout.tile_words(bits))
    given, made = (native, packed) if to == "marlin" else (packed, native)
    threads = REPACK_THREADS * -(-k_tiles // arguments.repack_tiles(bits))
    shape = mx.array((n, k), mx.int32)

    def move(w: mx.array) -> mx.array:
        batch = w.shape[: w.ndim - len(given)]
        return kernel(
            inputs=(kernels.readable(w), shape),
            template=template,
            grid=(threads, n_tiles, math.prod(batch)),
            threadgroup=(REPACK_THREADS, 1, 1),
            output_shapes=((*batch, *made),),
            output_dtypes=(mx.uint32,),
        )[0]

    return move
