"""Conversion of codes between MLX's rows of bits and packed tiles.

The kernels of a GPU's back end do it, after their known-answer check, if it has them;
otherwise MLX's own operations do.
"""

from math import prod

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import launcher, selection
from mlx_marlin.planning.block_plans import RepackPlan
from mlx_marlin.weights import layout, tile_conversion

CODES_AT_ONCE = {mx.cpu: 2**20, mx.gpu: 2**25}
"""Codes that are converted or compared at a time, by the device: intermediate arrays
stay in a CPU's cache, and on a GPU, for which each piece is a wait, below 1 GB."""


def to_tiles(w: mx.array, n: int, k: int, *, bits: int, group_size: int) -> mx.array:
    """Returns the codes of rows as tiles, as `tile_conversion.tiles_of_rows` does.

    The tiles are read back and compared with `w` before they are returned. In a trace
    of `mx.compile` or another transformation, no comparison is possible.
    """
    form = {"bits": bits, "group_size": group_size}
    plan = RepackPlan(to="marlin", batch=w.shape[:-2], n=n, k=k, **form)
    if _by_kernel(plan):
        tiles: mx.array = launcher.call(plan)(w)
        if _is_same(w, tiles, n, k, **form):
            return tiles
        guard.condemn(plan, f"wrong codes for {k}→{n}")
    tiles = _tiles_in_pieces(w, n, k, **form)
    if not _is_same(w, tiles, n, k, **form):
        raise RuntimeError(
            f"packing {k}→{n} of {bits} bits in groups of {group_size} changed its "
            f"codes; the weight was left as it was"
        )
    return tiles


def _tiles_in_pieces(
    w: mx.array, n: int, k: int, *, bits: int, group_size: int
) -> mx.array:
    """Converts so many rows at a time that intermediate arrays stay small."""
    weights = prod(w.shape[:-2])
    at_once = max(_at_once() // (weights * k * layout.TILE_N), 1) * layout.TILE_N
    pieces: list[mx.array] = []
    for first in range(0, n, at_once):
        own = w[..., first : first + at_once, :]
        if pieces:  # one after the other: MLX would allocate for all of them at once
            own = mx.depends(own, pieces[-1:])
        rows = own.shape[-2]
        form = {"bits": bits, "group_size": group_size}
        pieces.append(tile_conversion.tiles_of_rows(own, rows, k, **form))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-3)


def to_rows(words: mx.array, n: int, k: int, *, bits: int, group_size: int) -> mx.array:
    """Returns the codes of tiles as rows, as `tile_conversion.rows_of_tiles` does."""
    form = {"bits": bits, "group_size": group_size}
    plan = RepackPlan(to="mlx", batch=words.shape[:-3], n=n, k=k, **form)
    if _by_kernel(plan):
        rows: mx.array = launcher.call(plan)(words)
        return rows
    return tile_conversion.rows_of_tiles(words, n, k, **form)


def _at_once() -> int:
    return CODES_AT_ONCE[mx.default_device().type]


def _by_kernel(plan: RepackPlan) -> bool:
    return _on_gpu() and guard.why_not(plan) is None


def _on_gpu() -> bool:
    # On a CPU, MLX's operations are compiled code, whereas the emulator runs the
    # kernels one thread at a time.
    backend = selection.backend()
    if backend not in selection.ON_GPU or RepackPlan not in selection.traits().launches:
        return False
    here = mx.default_device() != mx.Device(mx.cpu)
    return here or selection.forced_backend() is not None


def _is_same(
    w: mx.array, tiles: mx.array, n: int, k: int, *, bits: int, group_size: int
) -> bool:
    """Returns whether tiles hold the codes of w; True if nothing can be compared."""
    if selection.missing() is not None:
        return True  # graphs can be built here, but not evaluated
    form = {"bits": bits, "group_size": group_size}
    plan = RepackPlan(to="mlx", batch=w.shape[:-2], n=n, k=k, **form)
    rows = w.reshape(-1, n, w.shape[-1])
    stored = tiles.reshape(-1, *tiles.shape[-3:])
    at_once = max(_at_once() // (k * layout.TILE_N), 1)  # tiles along n
    try:
        if _by_kernel(plan):  # hundreds of times as fast as piece by piece
            return bool(mx.array_equal(w, launcher.call(plan)(tiles)).item())
        for own, packed in zip(rows, stored, strict=True):
            for first in range(0, len(packed), at_once):
                part = own[first * layout.TILE_N : (first + at_once) * layout.TILE_N]
                read = tile_conversion.rows_of_tiles(
                    packed[first : first + at_once],
                    len(part),
                    k,
                    **form,
                )
                if not mx.array_equal(part, read).item():
                    return False
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
    return True
