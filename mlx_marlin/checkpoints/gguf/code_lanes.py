"""Codes in 64-bit lanes: eight codes, one in each byte, the first in the lowest.

All codes of a chunk are moved by a few operations on whole arrays.
"""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]
    Lanes: TypeAlias = npt.NDArray[np.uint64]

LANE = 8
"""Codes, and bytes, of a lane."""


def planes(octets: "Bytes", run: int, bits: int) -> "Lanes":
    """Divides bytes that hold several codes each into lanes.

    Args:
        octets: [b, bytes]. In every `run` of bytes, the lowest `bits` bits of all bytes
            are the first codes, the next bits the codes after these, and so on.
        run: Bytes of a run, a multiple of 8.
        bits: Bits of a code: 1, 2 or 4.

    Returns:
        uint64 [b, bytes / bits].
    """
    import numpy as np

    count = len(octets)
    lanes = np.ascontiguousarray(octets).view("<u8").reshape(count, -1, run // LANE)
    mask = np.uint64(_repeated((1 << bits) - 1, 8))
    divided = np.empty((*lanes.shape[:2], 8 // bits, lanes.shape[2]), np.uint64)
    for index in range(8 // bits):
        plane = lanes >> np.uint64(bits * index)
        plane &= mask
        for column in range(run // LANE):  # NumPy is slow on short inner axes
            divided[:, :, index, column] = plane[:, :, column]
    return divided.reshape(count, -1)


def single_bits(octets: "Bytes") -> "Lanes":
    """Returns the bits of bytes [b, bytes], low bit first, as lanes [b, bytes]."""
    import numpy as np

    bits = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little")
    spread: Lanes = bits.view("<u8")[octets]
    return spread


def packed_lanes(lanes: "Lanes", bits: int) -> "Bytes":
    """Packs codes into a stream of bits, the first code in the lowest bits.

    Args:
        lanes: Codes below 2^bits, uint64 [b, lanes]. They are overwritten.
        bits: Bits of a code: 4, 5, 6 or 8.

    Returns:
        uint8 [b, lanes * bits]. Eight codes end where a byte ends.
    """
    import numpy as np

    width = bits
    for field in (8, 16, 32):
        if bits == LANE:
            break
        # Two fields, of which `width` bits are used, become one of twice the width.
        low = (1 << width) - 1
        upper = lanes >> np.uint64(field - width)
        upper &= np.uint64(_repeated(low << width, 2 * field))
        lanes &= np.uint64(_repeated(low, 2 * field))
        lanes |= upper
        width *= 2
    unit = {4: np.uint32, 5: np.uint8, 6: np.uint16, 8: np.uint64}[bits]
    units = lanes.view(unit).reshape(lanes.size, -1)
    used = np.ascontiguousarray(units[:, : bits // np.dtype(unit).itemsize])
    return used.view(np.uint8).reshape(len(lanes), -1)


def _repeated(value: int, field: int) -> int:
    """Returns 64 bits that hold the same value in every field."""
    return sum(value << at for at in range(0, 64, field))
