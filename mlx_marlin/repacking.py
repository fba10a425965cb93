"""Moves codes between MLX's rows of bits and packed tiles, exactly."""

import math
from collections.abc import Callable

import mlx.core as mx

from mlx_marlin import backends, kernel_arguments, layout, source
from mlx_marlin.codes import codes_of_words, words_of_codes
from mlx_marlin.formats import planes_of

REPACK_THREADS = 256
"""Threads that move some tiles of a weight."""


def to_tiles(w: mx.array, n: int, k: int, *, bits: int, group_size: int) -> mx.array:
    """Returns the codes of rows as tiles; those past n or k are 0.

    Args:
        w: Codes, uint32 [..., n, k * bits / 32]: one weight or a batch.
        n: Rows of the weight.
        k: Columns of the weight.
        bits: Bits of a code.
        group_size: Weights along k that share a scale.

    Returns:
        uint32 [..., n tiles, k tiles, 64 * bits], in the order of `layout`.
    """
    if _on_gpu():
        move = repack("marlin", n=n, k=k, bits=bits, group_size=group_size)
        return move(w)
    rows, columns = layout.padded(n, k)
    *batch, _, _ = w.shape
    whole = [(0, 0)] * len(batch)
    codes = mx.pad(codes_of_words(w, bits), [*whole, (0, rows - n), (0, columns - k)])
    order = layout.order_of_group(group_size)
    tiles = _store(codes.reshape(-1, columns), bits, order)
    return tiles.reshape(*batch, rows // layout.TILE_N, *tiles.shape[1:])


def to_rows(words: mx.array, n: int, k: int, *, bits: int, group_size: int) -> mx.array:
    """Returns the codes of tiles as rows, uint32 [..., n, k * bits / 32].

    The inverse of `to_tiles`, whose arguments and result change places.
    """
    if _on_gpu():
        move = repack("mlx", n=n, k=k, bits=bits, group_size=group_size)
        return move(words)
    *batch, _, k_tiles, of_tile = words.shape
    order = layout.order_of_group(group_size)
    codes = _load(words.reshape(-1, k_tiles, of_tile), bits, order)
    whole = codes.reshape(*batch, *layout.padded(n, k))
    return words_of_codes(whole[..., :n, :k], bits)


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
    kernel = backends.kernel(source.repack_source(to))
    template = backends.template(
        kernel_arguments.repack_template(bits, layout.order_of_group(group_size))
    )
    n_tiles, k_tiles = (-(-n // layout.TILE_N), -(-k // layout.TILE_K))
    native = (n, k * bits // 32)
    packed = (n_tiles, k_tiles, layout.tile_words(bits))
    given, made = (native, packed) if to == "marlin" else (packed, native)
    threads = REPACK_THREADS * -(-k_tiles // kernel_arguments.repack_tiles(bits))
    shape = mx.array((n, k), mx.int32)

    def move(w: mx.array) -> mx.array:
        batch = w.shape[: w.ndim - len(given)]
        return kernel(
            inputs=(backends.readable(w), shape),
            template=template,
            grid=(threads, n_tiles, math.prod(batch)),
            threadgroup=(REPACK_THREADS, 1, 1),
            output_shapes=((*batch, *made),),
            output_dtypes=(mx.uint32,),
        )[0]

    return move


def _on_gpu() -> bool:
    # Elsewhere the same moves are MLX's operations: on a CPU they are compiled code,
    # and the emulator would run the kernels a thread at a time.
    if backends.backend() != "metal":
        return False
    here = mx.default_device() != mx.Device(mx.cpu)
    return here or backends.forced_backend() is not None


def _store(codes: mx.array, bits: int, order: str) -> mx.array:
    """Arranges padded codes [n, k] as words, plane after plane in each tile."""
    n, k = codes.shape
    planes, low = [], 0
    for own in planes_of(bits):
        plane = codes >> low & (1 << own) - 1
        digits = plane.reshape(_loaded_shape(own, order, n, k))
        stored = digits.transpose(_permutation()).reshape(n // 32, k // 64, -1)
        planes.append(words_of_codes(stored, own))
        low += own
    return mx.concatenate(planes, axis=-1)


def _load(words: mx.array, bits: int, order: str) -> mx.array:
    """Reads the padded codes [n, k] of words: the inverse of `_store`."""
    tiles_n, tiles_k, _ = words.shape
    n, k = tiles_n * layout.TILE_N, tiles_k * layout.TILE_K
    codes, low, first = mx.zeros((n, k), mx.uint8), 0, 0
    for own in planes_of(bits):
        end = first + layout.tile_words(own)
        radix = layout.sizes(own, order)
        stored = codes_of_words(words[..., first:end], own).reshape(
            tiles_n, tiles_k, *(radix[name] for name in layout.STORED)
        )
        codes = codes | stored.transpose(_inverse(_permutation())).reshape(n, k) << low
        low, first = low + own, end
    return codes


def _loaded_shape(bits: int, order: str, n: int, k: int) -> tuple[int, ...]:
    radix = layout.sizes(bits, order)
    row = (radix[name] for name in layout.ROW)
    column = (radix[name] for name in layout.K_DIGITS)
    return (n // layout.TILE_N, *row, k // layout.TILE_K, *column)


def _permutation() -> tuple[int, ...]:
    loaded = ("tile_n", *layout.ROW, "tile_k", *layout.K_DIGITS)
    return tuple(loaded.index(name) for name in ("tile_n", "tile_k", *layout.STORED))


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(axis) for axis in range(len(permutation)))
