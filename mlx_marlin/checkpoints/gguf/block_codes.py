"""Codes of blocks, one in each byte, and as a stream of bits."""

from math import gcd
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]


def planes(octets: "Bytes", run: int, bits: int) -> "Bytes":
    """Returns the codes of bytes [b, bytes] that hold several each: uint8 [b, codes].

    In every `run` of bytes, the lowest `bits` bits of all bytes are the first codes,
    the next bits the codes after these, and so on.
    """
    import numpy as np

    runs = octets.reshape(len(octets), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(octets), -1)


def stream(codes: "Bytes", bits: int) -> "Bytes":
    """Packs codes, uint8 [b, codes], into bytes, the first code in the lowest bits.

    Together they fill whole bytes.
    """
    import numpy as np

    run = 8 // gcd(bits, 8)
    runs = codes.reshape(len(codes), -1, run)
    octets = np.zeros((*runs.shape[:2], run * bits // 8), np.uint8)
    for index in range(run):
        octet, shift = divmod(bits * index, 8)
        octets[..., octet] |= runs[..., index] << shift
        if shift + bits > 8:
            octets[..., octet + 1] |= runs[..., index] >> 8 - shift
    return octets.reshape(len(codes), -1)
