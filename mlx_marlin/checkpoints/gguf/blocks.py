"""Blocks of GGUF's types as rows of codes, exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_marlin.checkpoints.stored_weight import StoredWeight

Bytes: TypeAlias = npt.NDArray[np.uint8]
Parameters: TypeAlias = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF's tensors."""

    name: str  # name in ggml, such as "Q4_K"
    elements: int  # elements of a block, along a row
    nbytes: int  # bytes of a block


BLOCK_TYPES: dict[int, BlockType] = {
    number: BlockType(name, elements, nbytes)
    for number, name, elements, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
"""By their number in the file. Types that are not read are listed for messages."""


def planes(octets: Bytes, run: int, bits: int) -> Bytes:
    """Returns the codes of bytes [b, bytes] that hold several each: uint8 [b, codes].

    In every `run` of bytes, the lowest `bits` bits of all bytes are the first codes,
    the next bits the codes after these, and so on.
    """
    runs = octets.reshape(len(octets), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(octets), -1)


def stream(codes: Bytes, bits: int) -> Bytes:
    """Packs codes, uint8 [b, codes], into bytes, the first code in the lowest bits.

    Together they fill whole bytes.
    """
    run = 8 // gcd(bits, 8)
    runs = codes.reshape(len(codes), -1, run)
    octets = np.zeros((*runs.shape[:2], run * bits // 8), np.uint8)
    for index in range(run):
        octet, shift = divmod(bits * index, 8)
        octets[..., octet] |= runs[..., index] << shift
        if shift + bits > 8:
            octets[..., octet + 1] |= runs[..., index] >> 8 - shift
    return octets.reshape(len(codes), -1)


CHUNK = 1 << 18
"""Bytes of blocks that are converted at a time: a core's cache holds what they become.
"""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook of IQ4_NL and IQ4_XS: ggml's `kvalues_iq4nl`."""
PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types of single numbers, by NumPy's name; it has no bfloat16."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a block lie, and what the weight becomes."""

    mode: str  # mode of the `StoredWeight`
    bits: int  # bits of a code
    group_size: int  # weights that share a scale
    # Returns the codes of blocks [b, bytes] in the order of the row
    codes: Callable[[Bytes], Bytes]
    # Returns what the blocks store next to their codes, [b, values of a block], by the
    # name of the attribute of `StoredWeight`
    parameters: Callable[[Bytes], Parameters]
    # What codes stand for, if they are places in a table
    codebook: tuple[int, ...] | None = None


def read_plain(data: memoryview, block: BlockType, shape: tuple[int, ...]) -> mx.array:
    """Reads a tensor of one of the types in `PLAIN`."""
    array = mx.array(np.frombuffer(data, PLAIN[block.name]).reshape(shape))
    return array.view(mx.bfloat16) if block.name == "BF16" else array


def read_blocks(
    data: memoryview, block: BlockType, shape: tuple[int, ...]
) -> StoredWeight:
    """Reads a weight [..., n, k] of one of the types in `LAYOUTS`.

    Scales that are no finite numbers raise a ValueError.
    """
    layout = LAYOUTS[block.name]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, block.nbytes)
    codes = np.empty((len(blocks), block.elements * layout.bits // 8), np.uint8)
    chunks: list[Parameters] = []
    step = max(1, CHUNK // block.nbytes)
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        codes[first : first + step] = stream(layout.codes(chunk), layout.bits)
        chunks.append(layout.parameters(chunk))
    words = codes.reshape(prod(shape[:-1]), -1).view("<u4")
    parameters = {name: _joined(chunks, name, shape) for name in chunks[0]}
    return StoredWeight(
        codes=mx.array(words.reshape(*shape[:-1], -1)),
        scales=parameters["scales"],
        biases=parameters.get("biases"),
        group_size=layout.group_size,
        bits=layout.bits,
        mode=layout.mode,
        codebook=None
        if layout.codebook is None
        else mx.array(layout.codebook, mx.float32),
    )


def _joined(chunks: list[Parameters], name: str, shape: tuple[int, ...]) -> mx.array:
    """Returns a parameter of all blocks, for each row of the weight."""
    joined = np.concatenate([chunk[name] for chunk in chunks])
    return mx.array(joined.reshape(*shape[:-1], -1))


def _halves(blocks: Bytes, start: int, stop: int) -> npt.NDArray[np.float16]:
    """Reads float16 numbers of blocks, which must be finite."""
    octets = np.ascontiguousarray(blocks[:, start:stop])
    if np.any(octets.view("<u2") & 0x7C00 == 0x7C00):
        raise ValueError("a scale or an offset of a block is NaN or infinite")
    return octets.view("<f2")


def _scale(blocks: Bytes) -> Parameters:
    return {"scales": _halves(blocks, 0, 2)}


def _scale_and_bias(blocks: Bytes) -> Parameters:
    return {"scales": _halves(blocks, 0, 2), "biases": _halves(blocks, 2, 4)}


def _sign_parameters(blocks: Bytes) -> Parameters:
    """Reads Q1_0's, whose codes 0 and 1 are -d and d."""
    scales = _halves(blocks, 0, 2)
    if np.any(np.abs(scales) >= 32768):
        raise ValueError("a scale of a block is above 32752, and twice it no float16")
    return {"scales": scales * np.float16(2), "biases": -scales}


def _k_parameters(blocks: Bytes) -> Parameters:
    """Reads those of Q4_K and Q5_K as `weights.super_blocks` stores them.

    There are 6-bit scales and offsets in 12 bytes. The upper two bits of the first 8
    bytes belong to the last 4 scales and offsets.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6 << 4)], axis=1)
    pairs = np.stack([scales, minima], axis=-1).reshape(len(blocks), -1)
    return _super_blocks(pairs, _halves(blocks, 0, 4))


def _stored_records(groups: slice, factors: slice) -> Callable[[Bytes], Parameters]:
    """Returns what reads parameters that lie in a block as they are stored."""
    return lambda blocks: _super_blocks(
        np.ascontiguousarray(blocks[:, groups]),
        _halves(blocks, factors.start, factors.stop),
    )


def _q3_k_parameters(blocks: Bytes) -> Parameters:
    """Reads scales of 6 bits as signed bytes."""
    low, high = planes(blocks[:, 96:104], 8, 4), planes(blocks[:, 104:108], 4, 2)
    groups = _with_high_bits(low, high) - np.uint8(32)
    return _super_blocks(groups, _halves(blocks, 108, 110))


def _iq4_xs_parameters(blocks: Bytes) -> Parameters:
    """Reads scales of 6 bits as signed bytes; the upper two bits precede the lower."""
    low, high = planes(blocks[:, 4:8], 1, 4), planes(blocks[:, 2:4], 1, 2)
    groups = _with_high_bits(low, high) - np.uint8(32)
    return _super_blocks(groups, _halves(blocks, 0, 2))


def _super_blocks(groups: Bytes, factors: npt.NDArray[np.float16]) -> Parameters:
    return {"scales": np.concatenate([groups.view("<u2"), factors.view("<u2")], 1)}


def _mxfp4_parameters(blocks: Bytes) -> Parameters:
    """Reads powers of two; 255 is 2^128 in ggml and NaN in the specification."""
    scales = blocks[:, :1]
    if (scales == 255).any():
        raise ValueError("a scale of a block is 255, which is no finite number")
    return {"scales": scales}


def _nvfp4_parameters(blocks: Bytes) -> Parameters:
    """Reads E4M3 numbers without a sign; ggml reads 0x7F, a NaN elsewhere, as 0."""
    scales = blocks[:, :4]
    if (scales > 0x7F).any():
        raise ValueError("a scale of a block has a sign, but NVFP4's have none")
    return {"scales": np.where(scales == 0x7F, np.uint8(0), scales)}


def _with_high_bits(low: Bytes, high: Bytes, shift: int = 4) -> Bytes:
    return low | high << np.uint8(shift)


def _signed_bytes(octets: Bytes) -> Bytes:
    """Returns signed bytes plus 128."""
    return octets ^ np.uint8(128)


LAYOUTS = {
    "Q1_0": Layout(
        "affine", 1, 128, lambda b: planes(b[:, 2:], 1, 1), _sign_parameters
    ),
    "Q4_0": Layout("symmetric", 4, 32, lambda b: planes(b[:, 2:], 16, 4), _scale),
    "Q4_1": Layout("affine", 4, 32, lambda b: planes(b[:, 4:], 16, 4), _scale_and_bias),
    "Q5_0": Layout(
        "symmetric",
        5,
        32,
        lambda b: _with_high_bits(planes(b[:, 6:], 16, 4), planes(b[:, 2:6], 1, 1)),
        _scale,
    ),
    "Q5_1": Layout(
        "affine",
        5,
        32,
        lambda b: _with_high_bits(planes(b[:, 8:], 16, 4), planes(b[:, 4:8], 1, 1)),
        _scale_and_bias,
    ),
    "Q8_0": Layout("symmetric", 8, 32, lambda b: _signed_bytes(b[:, 2:]), _scale),
    "Q2_K": Layout(
        "k_quant",
        2,
        16,
        lambda b: planes(b[:, 16:80], 32, 2),
        _stored_records(slice(16), slice(80, 84)),
    ),
    "Q3_K": Layout(
        "k_quant",
        3,
        16,
        lambda b: _with_high_bits(
            planes(b[:, 32:96], 32, 2), planes(b[:, :32], 32, 1), 2
        ),
        _q3_k_parameters,
    ),
    "Q4_K": Layout("k_quant", 4, 32, lambda b: planes(b[:, 16:], 32, 4), _k_parameters),
    "Q5_K": Layout(
        "k_quant",
        5,
        32,
        lambda b: _with_high_bits(planes(b[:, 48:], 32, 4), planes(b[:, 16:48], 32, 1)),
        _k_parameters,
    ),
    "Q6_K": Layout(
        "k_quant",
        6,
        16,
        lambda b: _with_high_bits(
            planes(b[:, :128], 64, 4), planes(b[:, 128:192], 32, 2)
        ),
        _stored_records(slice(192, 208), slice(208, 210)),
    ),
    "IQ4_NL": Layout("codebook", 4, 32, lambda b: planes(b[:, 2:], 16, 4), _scale, IQ4),
    "IQ4_XS": Layout(
        "k_codebook", 4, 32, lambda b: planes(b[:, 8:], 16, 4), _iq4_xs_parameters, IQ4
    ),
    "MXFP4": Layout(
        "mxfp4", 4, 32, lambda b: planes(b[:, 1:], 16, 4), _mxfp4_parameters
    ),
    "NVFP4": Layout(
        "nvfp4", 4, 16, lambda b: planes(b[:, 4:], 8, 4), _nvfp4_parameters
    ),
}
"""The quantized types that are read, by ggml's name."""
