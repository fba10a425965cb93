"""Quantization of weights, and conversion between the layouts mlx and marlin."""

from contextlib import suppress
from math import prod
from operator import index

import mlx.core as mx

from mlx_marlin import guard, state
from mlx_marlin.argument_types import (
    check_arrays,
    check_format,
    check_optional_arrays,
)
from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.block_plans import RepackPlan
from mlx_marlin.weights import (
    codebooks,
    layout,
    quantizers,
    super_blocks,
    tile_conversion,
)
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import (
    DTYPE_BYTES,
    Format,
    defaults_of,
    format_of,
)
from mlx_marlin.weights.packed_weight import (
    GroupSize,
    PackedWeight,
    check_global_scale,
    check_groups,
)
from mlx_marlin.weights.tile_conversion import deinterleave, interleave


def quantize(
    w: mx.array,
    *,
    group_size: GroupSize = None,
    bits: int | None = None,
    mode: str = "affine",
    symmetric: bool = False,
    global_scale: mx.array | None = None,
) -> PackedWeight:
    """Quantizes a weight and packs it.

    Args:
        w: Weight [n, k] or a batch [..., n, k], float16, bfloat16 or float32; k is a
            multiple of `group_size`.
        group_size: Weights along k that share a scale, "channel" or k for a whole row.
            Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: A scheme of `mx.quantize`, or "symmetric": codes of b bits represent
            -2^(b-1) to 2^(b-1) - 1 times the scale, and zero is exact.
        symmetric: The same as `mode="symmetric"`.
        global_scale: For "nvfp4" the largest magnitude of w, float32 of one element, as
            for `mx.quantize`. Default: none.

    Returns:
        The packed weight. Its scales have w's dtype, or are bytes.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If w or the format is not supported.
    """
    check_arrays(w=w)
    check_optional_arrays(global_scale=global_scale)
    check_format(group_size, bits, mode, may_be_row=True)
    if symmetric and mode not in ("affine", "symmetric"):
        raise ValueError(f"symmetric=True is not for mode={mode!r}, only for integers")
    mode = "symmetric" if symmetric else mode
    bits = _bits(mode, bits)
    format = format_of(mode, bits)
    if w.ndim < 2 or dtype_name(w.dtype) not in DTYPE_BYTES:
        raise ValueError(
            f"w must be a matrix [n, k] or a batch of them, of {[*DTYPE_BYTES]}, "
            f"got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    if 0 in w.shape:
        raise ValueError(f"w has shape {w.shape}, expected at least one row and column")
    size = _group_size(mode, bits, group_size, w.shape[-1])
    check_groups("w", w.shape[-1], format, size)
    check_global_scale(global_scale, mode)
    if mode == "zero_point" or format.has_super_blocks or format.has_codebook:
        raise ValueError(f"mode={mode!r} is for weights that are quantized already")
    parts: tuple[mx.array, ...]
    if mode == "symmetric":
        parts = quantizers.symmetric(w, size, bits)
    elif size in format.group_sizes:
        parts = mx.quantize(w, size, bits, mode, global_scale=global_scale)
    else:
        parts = quantizers.affine(w, size, bits)
    return pack(
        *parts, group_size=size, bits=bits, mode=mode, global_scale=global_scale
    )


def pack(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: GroupSize = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    codebook: mx.array | None = None,
) -> PackedWeight:
    """Packs a quantized weight, exactly.

    n is padded to a multiple of 32 and k to a multiple of 64. The padding has code 0,
    scale 0 and bias 0, so it represents zero.

    Args:
        w: Codes as `mx.quantize` makes them, uint32 [n, k * bits / 32], or a batch of
            them [..., n, k * bits / 32].
        scales: Scales [..., n, k / group_size]; for "k_quant" and "k_codebook" the
            parameters of each row as `weights.super_blocks` describes them, uint16.
        biases: Biases, same shape as `scales`; for "zero_point" the zero points, whole
            numbers in the scales' dtype; None for schemes without biases.
        group_size: Weights along k that share a scale, "channel" or k for a whole row.
            Default: the mode's.
        bits: Bits of a code. Default: the mode's.
        mode: MLX's scheme, or "symmetric", "zero_point", "k_quant", "codebook" or
            "k_codebook".
        global_scale: As in `PackedWeight`.
        codebook: For "codebook" and "k_codebook" the numbers that codes of 4 bits stand
            for, floats [16].

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If the arrays do not fit each other or a supported format.
    """
    check_arrays(w=w, scales=scales)
    check_optional_arrays(biases=biases, global_scale=global_scale, codebook=codebook)
    check_format(group_size, bits, mode, may_be_row=True)
    bits = _bits(mode, bits)
    format = format_of(mode, bits)
    n, k, size = _check_native(w, scales, biases, format, group_size)
    table = codebooks.checked(codebook, format)
    tiles = _scales_of_tiles(scales, biases, format, (n, k, size))
    return PackedWeight(
        words=to_tiles(w, n, k, bits=bits, group_size=size),
        scales=tiles if table is None else codebooks.prepend(table, tiles),
        n=n,
        k=k,
        group_size=size,
        bits=bits,
        mode=mode,
        global_scale=global_scale,
    )


def unpack(packed: PackedWeight) -> tuple[mx.array, ...]:
    """Returns the arguments of `pack`, exactly: codes, scales, and biases if any.

    A codebook is `packed.codebook`.

    Raises:
        TypeError: If `packed` is not a `PackedWeight`.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"packed must be a PackedWeight, got {type(packed).__name__}")
    format = format_of(packed.mode, packed.bits)
    words = to_rows(
        packed.words,
        packed.n,
        packed.k,
        bits=packed.bits,
        group_size=packed.group_size,
    )
    tiles, size = packed.scales, packed.group_size
    if format.has_codebook:
        _, k = layout.padded(packed.n, packed.k)
        tiles = codebooks.scales(tiles, format, k, size)
    if format.has_super_blocks:
        return words, super_blocks.to_rows(tiles, packed.n, format, size)
    return words, *deinterleave(tiles, packed.n, packed.k // size, format.parameters)


def _scales_of_tiles(
    scales: mx.array,
    biases: mx.array | None,
    format: Format,
    sizes: tuple[int, int, int],
) -> mx.array:
    """Returns the parameters of groups in the order of packed tiles."""
    n, k, group_size = sizes
    if format.has_super_blocks:
        return super_blocks.to_tiles(scales, format, group_size)
    padded_n, padded_k = layout.padded(n, k)
    stored = [scales] if biases is None else [scales, biases]
    return interleave(stored, padded_n, -(-padded_k // group_size))


def _bits(mode: str, bits: int | None) -> int:
    return defaults_of(mode)[1] if bits is None else index(bits)


def _group_size(mode: str, bits: int, group_size: GroupSize, k: int) -> int:
    if group_size == "channel":
        return k
    return defaults_of(mode, bits)[0] if group_size is None else index(group_size)


def _check_native(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    format: Format,
    group_size: GroupSize,
) -> tuple[int, int, int]:
    """Checks a weight in MLX's layout; returns n, k and the group size."""
    if w.ndim < 2 or w.dtype != mx.uint32 or prod(w.shape) == 0:
        raise ValueError(
            f"w must be a non-empty uint32 matrix [n, k * {format.bits} / 32] or a "
            f"batch of them, got {dtype_name(w.dtype)} with shape {w.shape}"
        )
    n, k = w.shape[-2], w.shape[-1] * 32 // format.bits
    size = _group_size(format.mode, format.bits, group_size, k)
    check_groups("w", k, format, size)
    if (biases is not None) != format.has_second_array:
        expected = "biases" if format.codes == "affine" else "zero points as biases"
        raise ValueError(
            f"mode={format.mode!r} takes "
            + (f"{expected}, got None" if biases is None else "no biases")
        )
    for name, array in (("scales", scales), ("biases", biases)):
        if array is None:
            continue
        shape = (*w.shape[:-1], prod(format.records(k, size)))
        if format.has_second_array:
            shape = (*w.shape[:-1], k // size)
        if array.shape != shape or dtype_name(array.dtype) not in format.scale_dtypes:
            raise ValueError(
                f"{name} must be one of {[*format.scale_dtypes]} with shape {shape}, "
                f"got {dtype_name(array.dtype)} with shape {array.shape}"
            )
    return n, k, size


CODES_AT_ONCE = {mx.cpu: 2**20, mx.gpu: 2**27}
"""Codes that are converted or compared at a time, by the device: intermediate arrays
stay in a CPU's cache, and on a GPU, for which each piece is a wait, below 1 GB."""
_compared = state.register(set[tuple[RepackPlan, mx.DeviceType]]())
"""What MLX's operations converted rightly once, by device: not compared again."""


def to_tiles(w: mx.array, n: int, k: int, *, bits: int, group_size: int) -> mx.array:
    """Returns the codes of rows as tiles, as `tile_conversion.tiles_of_rows` does.

    Tiles of a kernel are read back and compared with `w` before they are returned,
    those of MLX's operations once for each shape and form, whatever the codes are: a
    comparison takes as long as the conversion. In a trace of `mx.compile` or another
    transformation, no comparison is possible.
    """
    form = {"bits": bits, "group_size": group_size}
    plan = RepackPlan(to="marlin", batch=w.shape[:-2], n=n, k=k, **form)
    if _by_kernel(plan):
        tiles: mx.array = graph.call(plan)(w)
        if _is_same(w, tiles, n, k, **form) is not False:
            return tiles
        guard.condemn(plan, f"wrong codes for {k}→{n}")
    tiles = _tiles_in_pieces(w, n, k, **form)
    own = (plan, mx.default_device().type)
    is_same = _is_begun(tiles) if own in _compared else _is_same(w, tiles, n, k, **form)
    if is_same:
        _compared.add(own)
    if is_same is False:
        raise RuntimeError(
            f"packing {k}→{n} of {bits} bits in groups of {group_size} changed its "
            f"codes; the weight was left as it was"
        )
    return tiles


def _is_begun(tiles: mx.array) -> bool | None:
    """Begins to compute tiles, to free what they are made of; None in a trace."""
    if selection.missing() is not None:
        return None  # graphs can be built here, but not evaluated
    with suppress(ValueError):  # of a transformation
        mx.async_eval(tiles)
        return True
    return None


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
        rows: mx.array = graph.call(plan)(words)
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
) -> bool | None:
    """Returns whether tiles hold the codes of w; None if nothing can be compared."""
    if selection.missing() is not None:
        return None  # graphs can be built here, but not evaluated
    form = {"bits": bits, "group_size": group_size}
    plan = RepackPlan(to="mlx", batch=w.shape[:-2], n=n, k=k, **form)
    rows = w.reshape(-1, n, w.shape[-1])
    stored = tiles.reshape(-1, *tiles.shape[-3:])
    at_once = max(_at_once() // (k * layout.TILE_N), 1)  # tiles along n
    try:
        if _by_kernel(plan):  # hundreds of times as fast as piece by piece
            return bool(mx.array_equal(w, graph.call(plan)(tiles)).item())
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
        return None
    return True
