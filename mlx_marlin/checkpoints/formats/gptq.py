"""Reads GPTQ checkpoints, versions 1 and 2, and AWQ ones in AutoAWQ's GEMM layout.

GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [k * bits / 32, n], `qzeros` int32 [groups,
n * bits / 32], `scales` [groups, n], `g_idx` int32 [k]; integers are streams of bits,
low bits first, along k and n. Version 1 stores zero points minus one.

Tools read a zero point that version 1 stores as 2^bits - 1 as 2^bits, as 0, or as 0
with a carry into its neighbour. It is only read if GPTQModel wrote the file, whose
subtraction is known; otherwise it becomes 2^bits, which `StoredWeight.checked` refuses.

If a config says `sym`, zero points say nothing: vLLM does not read them. There are
checkpoints of version 1 with 2^(bits - 1) instead of one less; others contradict it.

AWQ: `qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], `scales` [groups, n].
Nibbles 0 to 7 of a word belong to columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

import re
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats.integers import (
    Layer,
    Scheme,
    columns_of_words,
    integer_weight,
    layer_of,
)
from mlx_marlin.checkpoints.settings import one_value
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.bit_streams import words_of_codes

WIDTHS = (2, 3, 4, 8)
WHOLE_WIDTHS = (2, 4, 8)
"""Widths of which a word holds whole numbers."""


def read(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer."""
    qweight = folder.read(f"{layer}.qweight")
    scales = folder.read(f"{layer}.scales")
    if scales.ndim != 2 or qweight.ndim != 2 or qweight.dtype != mx.int32:
        raise ValueError(
            f"qweight {qweight.dtype} {qweight.shape} and scales {scales.shape}, "
            f"expected int32 [words, n] and [groups, n]"
        )
    g_idx = folder.arrays.get(f"{layer}.g_idx")
    k = g_idx.shape[0] if g_idx is not None and g_idx.shape else None
    groups, n = scales.shape
    own = layer_of(
        folder,
        schemes(settings),
        zeros=f"{layer}.qzeros",
        order=f"{layer}.g_idx",
        widths=_widths(qweight.shape[0] * 32, k),
        groups=groups,
    )
    zeros = None
    if own.zeros is not None:
        zeros = _zero_points(folder.read(own.zeros), n, own, settings)
    return integer_weight(
        qweight.view(mx.uint32).T,
        mx.contiguous(scales.T),
        None if zeros is None else zeros.T,
        bits=own.bits,
        k=own.k,
        order=own.column_order(folder, groups),
    )


def schemes(settings: dict[str, Any]) -> list[Scheme]:
    """Returns the scheme of all layers, and those that `dynamic` gives to some."""
    own = {key: settings.get(key) for key in ("sym", "desc_act")}
    return _schemes(settings, "GPTQ", own)


def _schemes(settings: dict[str, Any], tool: str, own: dict[str, Any]) -> list[Scheme]:
    usual = own | {
        "bits": one_value(settings, tool, "bits", "w_bit", "wbits"),
        "group_size": one_value(settings, tool, "group_size", "q_group_size"),
    }
    others = (settings.get("dynamic") or {}).values()
    return [
        Scheme(
            bits=each["bits"],
            group_size=each["group_size"],
            symmetric=each["sym"],
            act_order=each["desc_act"] if "desc_act" in own else None,
        )
        for each in (usual, *({**usual, **other} for other in others))
    ]


def _widths(bits_of_column: int, k: int | None) -> list[tuple[int, int]]:
    """Returns the (bits, k) of a column of so many bits; `g_idx` tells k."""
    return [
        (bits, bits_of_column // bits)
        for bits in WIDTHS
        if bits_of_column % bits == 0 and k in (None, bits_of_column // bits)
    ]


def _zero_points(
    words: mx.array, n: int, layer: Layer, settings: dict[str, Any]
) -> mx.array | None:
    """Returns the zero points of packed ones, int32 [groups, n]."""
    bits = layer.bits
    least = _least_zero(settings)
    stored = columns_of_words(words, bits, n)
    if layer.symmetric:
        middle = 2 ** (bits - 1)
        layer.check_zeros(stored, middle - least, middle)
        return None
    if least == 0:
        return stored.astype(mx.int32)
    if bits in WHOLE_WIDTHS and _is_from_gptqmodel(settings):
        # It subtracts from whole words, so that a zero point of 0 borrows from the next
        # one. The sum wraps around, which undoes that.
        ones = sum(1 << shift for shift in range(0, 32, bits))
        restored = columns_of_words(words.view(mx.uint32) + ones, bits, n)
        return restored.astype(mx.int32)
    return stored.astype(mx.int32) + 1


def _least_zero(settings: dict[str, Any]) -> int:
    """Returns the zero point that is stored as 0.

    `format` is the present name of the key, and `checkpoint_format` its old one.
    """
    known = {"gptq": 1, "gptq_v2": 0}
    version = one_value(settings, "GPTQ", "format", "checkpoint_format")
    if version not in (None, *known):
        raise ValueError(
            f"checkpoint_format={quoted(version)}, expected one of {[*known]}"
        )
    return known[version or "gptq"]


def _is_from_gptqmodel(settings: dict[str, Any]) -> bool:
    """Returns whether GPTQModel 0.9 or later wrote the checkpoint."""
    meta = settings.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    for tool in tools if isinstance(tools, list) else [tools]:
        found = re.match(r"gptqmodel:(\d+)\.(\d+)", str(tool).lower())
        if found and (int(found[1]), int(found[2])) >= (0, 9):
            return True
    return False


BITS = 4
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of the eight columns."""


def read_awq(folder: Folder, layer: str, settings: dict[str, Any]) -> StoredWeight:
    """Reads the weight of a layer."""
    # "version" is AutoAWQ's name of it, the others are GPTQModel's.
    names = ("version", "format", "checkpoint_format")
    version = one_value(settings, "AWQ", *names)
    if version not in (None, "gemm"):
        raise ValueError(f"AWQ version {quoted(version)}, expected 'gemm'")
    codes = _awq_rows(folder.read(f"{layer}.qweight"))
    scales = folder.read(f"{layer}.scales")
    k = codes.shape[1]
    if k % 8 or scales.ndim != 2:
        raise ValueError(f"codes of shape {codes.shape} with scales {scales.shape}")
    own = layer_of(
        folder,
        awq_schemes(settings),
        zeros=f"{layer}.qzeros",
        widths=[(BITS, k)],
        groups=scales.shape[0],
    )
    zeros = None if own.zeros is None else _awq_rows(folder.read(own.zeros))
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


def awq_schemes(settings: dict[str, Any]) -> list[Scheme]:
    """Returns what `schemes` does."""
    zero_point = settings.get("zero_point")
    if type(zero_point) not in (bool, type(None)):
        raise ValueError(f"zero_point={quoted(zero_point)}, expected true or false")
    return _schemes(settings, "AWQ", {"sym": zero_point is False})


def _awq_rows(words: mx.array) -> mx.array:
    """Returns the integers of words [k, n / 8] as uint8 [n, k]."""
    if words.ndim != 2 or words.dtype != mx.int32:
        raise ValueError(f"{words.dtype} {words.shape}, expected int32 [rows, words]")
    turned = mx.contiguous(words.view(mx.uint32).T)
    columns = [
        (turned >> BITS * nibble & 0xF).astype(mx.uint8) for nibble in NIBBLE_OF_COLUMN
    ]
    return mx.stack(columns, axis=1).reshape(-1, words.shape[0])
