"""Guarded memory: buffers with inaccessible pages on both sides."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metal_emulator.errors import EmulatorError
from metal_emulator.native import Region, library

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

POOL_BYTES = 256 << 20
POOL_REGIONS = 256
"""Limits of the free regions kept for later launches; each reserves guard pages."""


@dataclass
class Argument:
    """The value of one memory parameter of a kernel."""

    name: str  # Name of the parameter, for error messages
    # Initial bytes, uint8 [bytes]; None fills the memory with poison
    contents: npt.NDArray[np.uint8] | None
    size: int  # Number of bytes
    residue: int  # Address modulo 16
    writable: bool = False  # Whether the parameter is an output
    origin: int = 0  # Byte of the contents that the kernel's pointer points to


@dataclass
class MappedArgument:
    """An argument in guarded memory; `address` is the kernel's pointer."""

    argument: Argument
    region: Region
    address: int = 0

    def canary(self) -> int:
        """Returns 1 if bytes before it were changed, 2 if bytes behind it, else 0."""
        argument = self.argument
        return int(
            library().mslemu_canary(
                ctypes.byref(self.region), argument.size, argument.residue
            )
        )

    def fill(self) -> None:
        """Writes what the memory begins with."""
        argument = self.argument
        contents = argument.contents
        source = None if contents is None else contents.ctypes.data
        begin = library().mslemu_place(
            ctypes.byref(self.region), source, argument.size, argument.residue
        )
        self.address = begin + argument.origin

    def contents(self) -> npt.NDArray[np.uint8]:
        """Returns the memory itself (not a copy), uint8 [bytes]."""
        import numpy as np

        start = self.region.host + self.address - self.region.device
        block = (ctypes.c_uint8 * self.argument.size).from_address(start)
        return np.ctypeslib.as_array(block)


class _Pool:
    """Free regions, by number of pages and access rights."""

    def __init__(self) -> None:
        self.free: dict[tuple[int, bool], list[Region]] = {}
        self.bytes = 0
        self.regions = 0

    def take(self, size: int, writable: bool) -> Region:
        pages = max(1, -(-(size + 15) // mmap.PAGESIZE))
        kept = self.free.get((pages, writable))
        if kept:
            self.bytes -= kept[-1].bytes
            self.regions -= 1
            return kept.pop()
        return _new_region(pages * mmap.PAGESIZE, writable)

    def give(self, region: Region) -> None:
        if self.regions >= POOL_REGIONS or self.bytes + region.bytes > POOL_BYTES:
            self._close_all()
        key = (region.bytes // mmap.PAGESIZE, region.host == region.device)
        self.free.setdefault(key, []).append(region)
        self.bytes += region.bytes
        self.regions += 1

    def _close_all(self) -> None:
        for region in itertools.chain.from_iterable(self.free.values()):
            library().mslemu_region_close(ctypes.byref(region))
        self.free.clear()
        self.bytes = self.regions = 0


_pool = _Pool()
_launch_lock = threading.Lock()
_launching_thread = 0
"""The thread that holds the lock, or 0."""


def _new_region(length: int, writable: bool) -> Region:
    region = Region()
    if library().mslemu_region_open(ctypes.byref(region), length, writable):
        raise EmulatorError(f"the system refuses {length} bytes of guarded memory")
    return region


@contextmanager
def mapped(arguments: Sequence[Argument]) -> Iterator[list[MappedArgument]]:
    """Copies arguments to guarded memory for the duration of the block."""
    global _launching_thread
    library()
    if _launching_thread == threading.get_ident():
        raise EmulatorError("a handler of a signal cannot launch a kernel inside one")
    buffers: list[MappedArgument] = []
    with _launch_lock:
        _launching_thread = threading.get_ident()
        try:
            for argument in arguments:
                buffers.append(_map(argument))
            yield buffers
        finally:
            _launching_thread = 0
            for buffer in buffers:
                _pool.give(buffer.region)


def _map(argument: Argument) -> MappedArgument:
    region = _pool.take(argument.size, argument.writable)
    mapped = MappedArgument(argument, region)
    mapped.fill()
    return mapped
