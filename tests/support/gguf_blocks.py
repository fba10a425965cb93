"""Random blocks of GGUF's types, with scales that are numbers."""

import numpy as np
from gguf import GGMLQuantizationType, constants, quants

from mlx_marlin.checkpoints.gguf.blocks import LAYOUTS

NUMBERS = {kind.name: kind.value for kind in GGMLQuantizationType}
"""What a file calls a type."""
SIZES = {kind.name: sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}
"""Elements and bytes of a block."""
PLAIN = ("F32", "F16", "BF16")
HALVES = {
    "Q1_0": (0, 2),
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "Q5_0": (0, 2),
    "Q5_1": (0, 4),
    "Q8_0": (0, 2),
    "Q2_K": (80, 84),
    "Q3_K": (108, 110),
    "Q4_K": (0, 4),
    "Q5_K": (0, 4),
    "Q6_K": (208, 210),
    "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 2),
}
"""Where a block of a type with kernels has its float16 numbers: one or two."""
QUANTIZED = (*HALVES, "MXFP4", "NVFP4")
DECODED = [name for name in SIZES if name[:2] in ("IQ", "TQ") and name not in QUANTIZED]
"""Types without kernels, whose blocks have one float16 number."""
assert {*QUANTIZED} == {*LAYOUTS}


def draw_blocks(
    name: str,
    shape: tuple[int, ...],
    random: np.random.Generator,
    scales: tuple[float, ...] = (),
) -> np.ndarray:
    """Returns bytes [..., n, bytes of a row] of a weight [..., n, k].

    Without `scales` the float16 numbers of blocks are any finite ones, zero and
    subnormal too, or about 0.01 for types without kernels.
    """
    elements, nbytes = SIZES[name]
    blocks = (*shape[:-1], shape[-1] // elements)
    octets = random.integers(0, 256, (*blocks, nbytes), np.uint8)
    start, stop = HALVES.get(name, (0, 2))
    halves = np.empty((*blocks, (stop - start) // 2), "<f2")
    if name == "MXFP4":
        octets[..., 0] %= 253  # six times a larger scale is no float32
    elif name == "NVFP4":
        octets[..., :4] %= 127
    elif scales:
        halves[:] = scales
        set_halves(name, octets, halves)
    elif name in DECODED:
        halves[:] = random.uniform(0.005, 0.02, halves.shape)
        set_halves(name, octets, halves)
    else:  # twice the scale of Q1_0 is a float16 too
        bits = random.integers(0, 0x7800 if name == "Q1_0" else 0x7C00, halves.shape)
        signs = random.integers(0, 2, halves.shape) << 15
        set_halves(name, octets, (bits | signs).astype("<u2").view("<f2"))
    return octets.reshape(*shape[:-1], -1)


def set_halves(name: str, octets: np.ndarray, halves: np.ndarray) -> None:
    """Changes the float16 numbers [..., 1 or 2] of blocks [..., bytes]."""
    if name == "IQ1_M":  # four bits of the scale are the highest of each 16
        words = octets[..., -8:].view("<u2")
        words &= 0x0FFF
        words |= (halves.view("<u2") >> np.array([0, 4, 8, 12], "<u2") & 0xF) << 12
        return
    start, stop = HALVES.get(name, (-2, None) if name.startswith("TQ") else (0, 2))
    octets[..., start:stop] = halves.view(np.uint8)


def decoded(name: str, octets: np.ndarray) -> np.ndarray:
    """Returns the weights as the `gguf` package decodes them, which has no Q1_0."""
    if name != "Q1_0":
        with np.errstate(all="ignore"):
            return quants.dequantize(octets, GGMLQuantizationType[name])
    blocks = octets.reshape(*octets.shape[:-1], -1, 18)
    scales = blocks[..., :2].copy().view("<f2").astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    return np.where(signs, scales, -scales).reshape(*octets.shape[:-1], -1)
