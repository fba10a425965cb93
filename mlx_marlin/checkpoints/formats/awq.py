"""Reads AWQ checkpoints in AutoAWQ's GEMM layout.

Layout: `qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], `scales` [groups,
n]. Nibbles 0 to 7 of a word belong to columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import Scheme, integer_weight, layer_of
from mlx_marlin.checkpoints.settings import one_value
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.bit_streams import words_of_codes

BITS = 4
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of the eight columns."""


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer."""
    # "version" is AutoAWQ's name of it, the others are GPTQModel's.
    names = ("version", "format", "checkpoint_format")
    version = one_value(settings, "AWQ", *names)
    if version not in (None, "gemm"):
        raise ValueError(f"AWQ version {quoted(version)}, expected 'gemm'")
    codes = _rows(folder.read(f"{layer}.qweight"))
    scales = folder.read(f"{layer}.scales")
    k = codes.shape[1]
    if k % 8 or scales.ndim != 2:
        raise ValueError(f"codes of shape {codes.shape} with scales {scales.shape}")
    own = layer_of(
        folder,
        schemes(settings),
        zeros=f"{layer}.qzeros",
        widths=[(BITS, k)],
        groups=scales.shape[0],
    )
    zeros = None if own.zeros is None else _rows(folder.read(own.zeros))
    if zeros is not None and own.symmetric:
        own.check_zeros(zeros, 2 ** (BITS - 1))
        zeros = None
    return integer_weight(
        words_of_codes(codes, BITS),
        mx.contiguous(scales.T),
        zeros,
        bits=BITS,
        k=k,
    )


def schemes(settings: dict[str, Any]) -> list[Scheme]:
    """Returns the scheme of all layers, and those that `dynamic` gives to some."""
    zero_point = settings.get("zero_point")
    if type(zero_point) not in (bool, type(None)):
        raise ValueError(f"zero_point={quoted(zero_point)}, expected true or false")
    usual = {
        "bits": one_value(settings, "AWQ", "bits", "w_bit", "wbits"),
        "group_size": one_value(settings, "AWQ", "group_size", "q_group_size"),
        "sym": zero_point is False,
    }
    others = (settings.get("dynamic") or {}).values()
    return [
        Scheme(bits=own["bits"], group_size=own["group_size"], symmetric=own["sym"])
        for own in (usual, *({**usual, **other} for other in others))
    ]


def _rows(words: mx.array) -> mx.array:
    """Returns the integers of words [k, n / 8] as uint8 [n, k]."""
    if words.ndim != 2 or words.dtype != mx.int32:
        raise ValueError(f"{words.dtype} {words.shape}, expected int32 [rows, words]")
    turned = mx.contiguous(words.view(mx.uint32).T)
    columns = [
        (turned >> BITS * nibble & 0xF).astype(mx.uint8) for nibble in NIBBLE_OF_COLUMN
    ]
    return mx.stack(columns, axis=1).reshape(-1, words.shape[0])
