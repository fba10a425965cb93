"""Random blocks of GGUF's types that have no kernels."""

import numpy as np
from gguf import GGMLQuantizationType, constants

from mlx_marlin.checkpoints.gguf.blocks import LAYOUTS

DECODED: dict[str, tuple[int, int, int]] = {
    kind.name: (kind.value, *constants.GGML_QUANT_SIZES[kind])
    for kind in GGMLQuantizationType
    if kind.name[:2] in ("IQ", "TQ") and kind.name not in LAYOUTS
}
"""Number in the file, elements and bytes of a block, by name."""


def draw_decoded(
    name: str, shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray:
    """Returns bytes [..., n, bytes of a row] with scales of about 0.01."""
    _, elements, nbytes = DECODED[name]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes))
    octets = blocks.astype(np.uint8)
    scales = random.uniform(0.005, 0.02, (*octets.shape[:-1], 1)).astype("<f2")
    if name == "IQ1_M":  # four bits of the scale are the highest of each 16
        words = octets[..., -8:].view("<u2")
        words &= 0x0FFF
        bits = scales.view("<u2")
        words |= (bits >> np.array([0, 4, 8, 12], "<u2") & 0xF) << 12
    else:
        at = slice(nbytes - 2, nbytes) if name.startswith("TQ") else slice(0, 2)
        octets[..., at] = scales.view(np.uint8)
    return octets.reshape(*shape[:-1], -1)
