"""Single functions of the shaders, called with numbers too large for arrays."""

from collections.abc import Callable
from dataclasses import dataclass

from support import shader_functions


@dataclass(frozen=True, slots=True)
class FunctionCase:
    """A function of the shaders and its results."""

    call: Callable[[], object]  # Calls it
    expected: object  # What it returns if the shaders are right

    def wrong_result(self) -> str | None:
        """The numbers themselves, which Python counts without an end."""
        found = self.call()
        return None if found == self.expected else f"{found} is not {self.expected}"


_PARTS, _TOTAL = 65535, 2**31 - 1
_RANGES = (1, 2, 32768, 65534, 65535)
_N, _K_TILES, _BATCH = 4096, 256, 65535

FUNCTION_CASES = {
    "cuts of 2**31 - 1 k tiles into 65535 ranges": FunctionCase(
        lambda: shader_functions.balanced_cuts(
            _RANGES, [_PARTS] * len(_RANGES), [_TOTAL] * len(_RANGES)
        ),
        [part * _TOTAL // _PARTS for part in _RANGES],
    ),
    "the 600th of experts of 2**23 words": FunctionCase(
        lambda: shader_functions.expert_offsets([600], [2**23]), [600 * 2**23]
    ),
    "to tiles, the 65536th weight of a batch": FunctionCase(
        lambda: shader_functions.repack_offsets(
            [(0, 0, _BATCH)], n=_N, k=64 * _K_TILES, bits=4
        ),
        # Rows of eight words a tile, and tiles of 256 words.
        [(_BATCH * _N * _K_TILES * 8, _BATCH * (_N // 32) * _K_TILES * 256)],
    ),
}
