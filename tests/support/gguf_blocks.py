"""Blocks of GGUF's types, written one weight at a time.

They follow the published layouts, and share no code with the reader.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SIZES = {  # elements, bytes
    "F32": (1, 4),
    "Q1_0": (128, 18),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "BF16": (1, 2),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
NUMBERS = {
    "F32": 0,
    "Q1_0": 41,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
    "NVFP4": 40,
}
QUANTIZED = [name for name, (elements, _) in SIZES.items() if elements > 1]
CODE_BITS = {
    "Q1_0": 1,
    "Q2_K": 2,
    "Q3_K": 3,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q6_K": 6,
    "Q8_0": 8,
}
IQ4_HALF = [1, 13, 25, 38, 53, 69, 89, 113, -10, -22, -35, -49, -65, -83, -104, -127]
"""What codes of IQ4 stand for: those from 8 on, then those below 8, downwards."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass
class Block:
    """What a block stores: codes without a sign, and whole numbers or float16 bits."""

    codes: list[int]
    halves: list[int]
    scales: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def draw_block(name: str, random: np.random.Generator) -> Block:
    bits = CODE_BITS.get(name, 4)
    codes = random.integers(0, 1 << bits, SIZES[name][0]).tolist()
    count = 2 if name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 1
    halves = [_draw_half(random) for _ in range(count)]
    if name == "Q1_0":  # twice the scale is a float16 too
        halves = [min(half & 0x7FFF, 0x77FF) | half & 0x8000 for half in halves]
    if name in ("Q4_K", "Q5_K"):
        scales, offsets = random.integers(0, 64, (2, 8)).tolist()
        return Block(codes, halves, scales, offsets)
    if name == "Q2_K":
        scales, offsets = random.integers(0, 16, (2, 16)).tolist()
        return Block(codes, halves, scales, offsets)
    if name == "Q3_K":
        return Block(codes, halves, random.integers(-32, 32, 16).tolist())
    if name == "IQ4_XS":
        return Block(codes, halves, random.integers(-32, 32, 8).tolist())
    if name == "Q6_K":
        return Block(codes, halves, random.integers(-128, 128, 16).tolist())
    if name == "MXFP4":
        # Six times a larger scale is no float32.
        return Block(codes, [], random.integers(0, 253, 1).tolist())
    if name == "NVFP4":
        return Block(codes, [], random.integers(0, 127, 4).tolist())
    return Block(codes, halves)


def _draw_half(random: np.random.Generator) -> int:
    """Returns the bits of any finite float16, of any sign, zero and subnormal too."""
    return int(random.integers(0, 0x7C00)) | int(random.integers(0, 2)) << 15


def write_block(name: str, block: Block) -> bytes:
    writers: dict[str, Any] = {
        "Q1_0": _write_q1_0,
        "Q4_0": _write_legacy,
        "Q4_1": _write_legacy,
        "Q5_0": _write_legacy,
        "Q5_1": _write_legacy,
        "Q8_0": _write_q8_0,
        "Q2_K": _write_q2_k,
        "Q3_K": _write_q3_k,
        "Q4_K": _write_k,
        "Q5_K": _write_k,
        "Q6_K": _write_q6_k,
        "IQ4_NL": _write_legacy,
        "IQ4_XS": _write_iq4_xs,
        "MXFP4": _write_legacy,
        "NVFP4": _write_nvfp4,
    }
    written: bytes = writers[name](name, block)
    assert len(written) == SIZES[name][1]
    return written


def block_values(name: str, block: Block) -> list[float]:
    """Returns the weights, in float64 (where every product here is exact)."""
    d, m = [*map(_half, block.halves), 0.0, 0.0][:2]
    values = []
    for index, code in enumerate(block.codes):
        if name == "Q1_0":
            values.append(d if code else -d)
        elif name in ("Q4_1", "Q5_1"):
            values.append(code * d + m)
        elif name in ("Q4_K", "Q5_K"):
            group = index // 32
            values.append(d * block.scales[group] * code - m * block.offsets[group])
        elif name == "Q2_K":
            group = index // 16
            values.append(d * block.scales[group] * code - m * block.offsets[group])
        elif name == "Q3_K":
            values.append(d * block.scales[index // 16] * (code - 4))
        elif name == "Q6_K":
            values.append(d * block.scales[index // 16] * (code - 32))
        elif name == "IQ4_NL":
            values.append(d * _iq4(code))
        elif name == "IQ4_XS":
            values.append(d * block.scales[index // 32] * _iq4(code))
        elif name == "MXFP4":
            values.append(2.0 ** (block.scales[0] - 127) * _e2m1(code))
        elif name == "NVFP4":
            values.append(_e4m3(block.scales[index // 16]) * _e2m1(code))
        else:
            values.append(d * (code - (1 << CODE_BITS.get(name, 4)) // 2))
    return values


def _half(bits: int) -> float:
    value: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    return value


def _e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def _iq4(code: int) -> int:
    return IQ4_HALF[code - 8 if code >= 8 else 15 - code]


def _e4m3(byte: int) -> float:
    exponent, fraction = byte >> 3, byte & 7
    if exponent == 0:
        return float(fraction * 2.0**-9)
    return float((1 + fraction / 8) * 2.0 ** (exponent - 7))


def _halves(block: Block) -> bytes:
    return b"".join(struct.pack("<H", bits) for bits in block.halves)


def _write_legacy(name: str, block: Block) -> bytes:
    """Writes Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4, whose scale is a byte."""
    head = _halves(block) + bytes(block.scales)
    if CODE_BITS.get(name) == 5:
        high = sum(code >> 4 << index for index, code in enumerate(block.codes))
        head += struct.pack("<I", high)
    low = [code & 15 for code in block.codes]
    return head + bytes(low[j] | low[j + 16] << 4 for j in range(16))


def _write_q1_0(name: str, block: Block) -> bytes:
    bits = sum(code << index for index, code in enumerate(block.codes))
    return _halves(block) + bits.to_bytes(16, "little")


def _write_q8_0(name: str, block: Block) -> bytes:
    signed = [code - 128 for code in block.codes]
    return _halves(block) + struct.pack("<32b", *signed)


def _write_k(name: str, block: Block) -> bytes:
    """Writes Q4_K and Q5_K."""
    packed = [0] * 12
    for j, (scale, offset) in enumerate(zip(block.scales, block.offsets, strict=True)):
        if j < 4:
            packed[j] |= scale
            packed[j + 4] |= offset
        else:
            packed[j + 4] = (scale & 15) | (offset & 15) << 4
            packed[j - 4] |= scale >> 4 << 6
            packed[j] |= offset >> 4 << 6
    high = b""
    if name == "Q5_K":
        octets = [0] * 32
        for index, code in enumerate(block.codes):
            octets[index % 32] |= (code >> 4) << index // 32
        high = bytes(octets)
    low = bytearray()
    for start in range(0, 256, 64):
        for j in range(32):
            first, second = block.codes[start + j], block.codes[start + 32 + j]
            low.append((first & 15) | (second & 15) << 4)
    return _halves(block) + bytes(packed) + high + bytes(low)


def _two_bits(codes: list[int]) -> bytes:
    """Writes the lower two bits of 256 codes: 32 bytes hold 128 of them."""
    octets = [0] * 64
    for index, code in enumerate(codes):
        half, inside = divmod(index, 128)
        octets[half * 32 + inside % 32] |= (code & 3) << 2 * (inside // 32)
    return bytes(octets)


def _write_q2_k(name: str, block: Block) -> bytes:
    pairs = zip(block.scales, block.offsets, strict=True)
    groups = bytes(scale | offset << 4 for scale, offset in pairs)
    return groups + _two_bits(block.codes) + _halves(block)


def _write_q3_k(name: str, block: Block) -> bytes:
    high, packed = [0] * 32, [0] * 12
    for index, code in enumerate(block.codes):
        high[index % 32] |= (code >> 2) << index // 32
    for index, signed in enumerate(block.scales):
        scale = signed + 32
        packed[index % 8] |= (scale & 15) << 4 * (index // 8)
        packed[8 + index % 4] |= (scale >> 4) << 2 * (index // 4)
    return bytes(high) + _two_bits(block.codes) + bytes(packed) + _halves(block)


def _write_q6_k(name: str, block: Block) -> bytes:
    low, high = [0] * 128, [0] * 64
    for index, code in enumerate(block.codes):
        half, inside = divmod(index, 128)
        low[half * 64 + inside % 64] |= (code & 15) << 4 * (inside // 64)
        high[half * 32 + inside % 32] |= (code >> 4) << 2 * (inside // 32)
    scales = struct.pack("<16b", *block.scales)
    return bytes(low) + bytes(high) + scales + _halves(block)


def _write_iq4_xs(name: str, block: Block) -> bytes:
    low, high = [0] * 4, 0
    for group, signed in enumerate(block.scales):
        low[group // 2] |= (signed + 32 & 15) << 4 * (group % 2)
        high |= (signed + 32 >> 4) << 2 * group
    codes = bytearray()
    for start in range(0, 256, 32):
        group = block.codes[start : start + 32]
        codes += bytes(group[j] | group[j + 16] << 4 for j in range(16))
    return _halves(block) + struct.pack("<H", high) + bytes(low) + bytes(codes)


def _write_nvfp4(name: str, block: Block) -> bytes:
    octets = bytearray(block.scales)
    for start in range(0, 64, 16):
        group = block.codes[start : start + 16]
        octets += bytes(group[j] | group[j + 8] << 4 for j in range(8))
    return bytes(octets)
