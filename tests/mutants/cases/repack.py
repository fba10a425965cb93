"""Codes to move on which a planted bug must show: ragged, batches, odd offsets."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import metal_emulator
from mlx_marlin.products.packing import to_tiles
from support import drawn_arrays, launches


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackCase:
    """Codes that move from one layout to the other."""

    to: str  # The layout that they come to
    n: int  # Rows of a weight
    k: int  # Columns of a weight
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    batch: tuple[int, ...] = ()  # How many weights there are, if there is a batch
    offset: int = 0  # Elements before the first in its buffer

    def rows(self) -> mx.array:
        """The codes in MLX's layout."""
        shape = (*self.batch, self.n, self.k * self.bits // 32)
        draw = np.random.default_rng(5)
        return mx.array(draw.integers(0, 2**32, shape, dtype=np.uint32))

    def tiles(self) -> mx.array:
        """The codes as tiles, by MLX's operations."""
        form = {"bits": self.bits, "group_size": self.group_size}
        return to_tiles(self.rows(), self.n, self.k, **form)

    def arrays(self) -> tuple[mx.array]:
        """What is to be moved."""
        words = self.rows() if self.to == "marlin" else self.tiles()
        return (drawn_arrays.shifted(words, self.offset),)

    def run(self, words: mx.array) -> mx.array:
        """The codes in the other layout, by the kernel."""
        move = launches.repack(
            self.to, n=self.n, k=self.k, bits=self.bits, group_size=self.group_size
        )
        made = move(words)
        mx.eval(made)
        return made

    def wrong_result(self) -> str | None:
        """Bits, as MLX's operations move them."""
        expected = self.tiles() if self.to == "marlin" else self.rows()
        made = self.run(*self.arrays())
        wrong = int((made != expected).sum())
        return f"{wrong} of {made.size} words" if wrong else None

    def miscounted(self) -> str | None:
        """Every word once, in whole lines, from rows in different banks."""
        found = metal_emulator.trace(self.run, *self.arrays())[0]
        size = self.rows().nbytes
        read, written, scratch = (found.of(name) for name in ("w", "out", "scratch"))
        counted = (read.read_bytes, written.written_bytes)
        lines = (128 * read.lines_128, 128 * written.lines_128)
        if counted != (size, size) or lines != (size, size):
            return f"{counted} bytes in lines of {lines} bytes, expected {size}"
        if scratch.bank_cycles > 4 * scratch.accesses:
            return f"{scratch.bank_cycles} cycles for {scratch.accesses} accesses"
        return None


REPACK_CASES = {
    "to tiles, two weights of 3 bits, groups of 64": RepackCase(
        to="marlin", n=41, k=64 * 18, bits=3, group_size=64, batch=(2,)
    ),
    "to tiles, codes of 1 bit, groups of 32, k tail": RepackCase(
        to="marlin", n=33, k=32 * 35, bits=1, group_size=32
    ),
    "to tiles, codes of 4 bits, whole tiles": RepackCase(
        to="marlin", n=64, k=512, bits=4, group_size=64
    ),
    "to rows, codes of 5 bits, groups of 32, k tail": RepackCase(
        to="mlx", n=33, k=32 * 35, bits=5, group_size=32
    ),
    "to rows, two weights of 6 bits, groups of 64, odd offsets": RepackCase(
        to="mlx", n=41, k=64 * 9, bits=6, group_size=64, batch=(2,), offset=3
    ),
    "to rows, codes of 4 bits, whole tiles": RepackCase(
        to="mlx", n=64, k=512, bits=4, group_size=64
    ),
}
