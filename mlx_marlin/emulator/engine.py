"""Memory and launch: from NumPy arrays to the run time and back."""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import itertools
import mmap
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_marlin.emulator.compiling import build, compiler
from mlx_marlin.emulator.errors import EmulatorError
from mlx_marlin.emulator.modes import Options

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_THREADS = 1024
MAX_TRACE = 24
POOL_BYTES = 256 << 20
MAX_HOST_THREADS = 1024
"""As in memory.cpp, residents included."""
POOL_REGIONS = 256
"""Free guarded memory that is kept for the next launches; each has far guards."""


class Coordinates(ctypes.Structure):
    """x, y, z, as in abi.h."""

    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def __iter__(self) -> Iterator[int]:
        yield from (self.x, self.y, self.z)


class Report(ctypes.Structure):
    """What went wrong, as in runtime.h."""

    _fields_ = [
        ("fault", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("threadgroup", Coordinates),
        ("size", Coordinates),
        ("is_write", ctypes.c_uint32),
        ("trace_length", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("text", ctypes.c_char_p),
        ("amount", ctypes.c_uint64),
        ("trace", ctypes.c_uint64 * MAX_TRACE),
        ("other_site", ctypes.c_uint64),
        ("other_thread", ctypes.c_uint32),
        ("other_is_write", ctypes.c_uint32),
        ("other_threadgroup", Coordinates),
    ]


class ThreadState(ctypes.Structure):
    """Where a thread waits, as in runtime.h."""

    _fields_ = [
        ("activity", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("site", ctypes.c_uint64),
        ("operation", ctypes.c_char_p),
    ]


class Launch(ctypes.Structure):
    """One dispatch, as in runtime.h."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("grid", Coordinates),
        ("threadgroup", Coordinates),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("states", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("library", ctypes.c_uint64),
        ("library_bytes", ctypes.c_uint64),
        ("time_limit", ctypes.c_uint64),
        ("resident", ctypes.c_uint32),
        ("interrupted", ctypes.c_uint32),
        ("report", Report),
    ]


class Region(ctypes.Structure):
    """Guarded memory, as in memory.cpp."""

    _fields_ = [
        ("host", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
    ]


@dataclass
class Argument:
    """What one memory parameter of a kernel gets.

    Attributes:
        name: For reports.
        contents: Bytes to put there, uint8 [bytes]; None for poison.
        size: Number of bytes.
        residue: Address modulo 16.
        writable: Whether it is an output.
        origin: Byte of the contents that the kernel's pointer points to.
    """

    name: str
    contents: npt.NDArray[np.uint8] | None
    size: int
    residue: int
    writable: bool = False
    origin: int = 0


@dataclass
class Placed:
    """An argument in guarded memory at `address`, as the kernel sees it."""

    argument: Argument
    region: Region
    address: int

    def canary(self) -> int:
        """0, or 1 / 2 if the bytes before / behind were changed."""
        argument = self.argument
        return int(
            library().mslemu_canary(
                ctypes.byref(self.region), argument.size, argument.residue
            )
        )

    def contents(self) -> npt.NDArray[np.uint8]:
        """The bytes themselves (not a copy), uint8 [bytes]."""
        import numpy as np

        start = self.region.host + self.address - self.region.device
        block = (ctypes.c_uint8 * self.argument.size).from_address(start)
        return np.ctypeslib.as_array(block)


@functools.cache
def library() -> ctypes.CDLL:
    """The run time, loaded where kernels find its symbols."""
    found = compiler.find()
    if found is None:
        raise EmulatorError(
            f"no Metal kernel can be compiled: {compiler.unavailable()}"
        )
    if sys.platform.startswith("linux"):
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(build.runtime_library(found)), mode=ctypes.RTLD_GLOBAL)
    size = ctypes.c_uint64
    loaded.mslemu_place.restype = ctypes.c_void_p
    loaded.mslemu_place.argtypes = [
        ctypes.POINTER(Region),
        ctypes.c_void_p,
        size,
        ctypes.c_uint32,
    ]
    loaded.mslemu_region_open.argtypes = [ctypes.POINTER(Region), size, ctypes.c_int]
    loaded.mslemu_region_close.argtypes = [ctypes.POINTER(Region)]
    loaded.mslemu_canary.argtypes = [ctypes.POINTER(Region), size, ctypes.c_uint32]
    loaded.mslemu_launch.argtypes = [ctypes.POINTER(Launch)]
    loaded.mslemu_launch.restype = ctypes.c_uint32
    return loaded


class _Pool:
    """Guarded memory between launches, by size and kind."""

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
        region = Region()
        length = pages * mmap.PAGESIZE
        if library().mslemu_region_open(ctypes.byref(region), length, writable):
            raise EmulatorError(f"the system refuses {length} bytes of guarded memory")
        return region

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
_one_launch = threading.Lock()


@contextmanager
def placed(arguments: Sequence[Argument]) -> Iterator[list[Placed]]:
    """Puts arguments into guarded memory for the time of the block."""
    place = library().mslemu_place
    here: list[Placed] = []
    with _one_launch:
        try:
            for argument in arguments:
                region = _pool.take(argument.size, argument.writable)
                contents = argument.contents
                source = None if contents is None else contents.ctypes.data
                address = place(
                    ctypes.byref(region), source, argument.size, argument.residue
                )
                here.append(Placed(argument, region, address + argument.origin))
            yield here
        finally:
            for one in here:
                _pool.give(one.region)


class _Loaded(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
    ]


def _load_address(entry: int) -> int:
    info = _Loaded()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(entry), ctypes.byref(info))
    return int(info.base)


_PADDING = 1 << 20  # a loaded file is that much longer than its text, at most


@dataclass
class Kernel:
    """A loaded kernel.

    Attributes:
        path: The library.
        loaded: The same, in this process.
        entry: Runs one thread.
        base: Where the library lies.
        size: Bytes from there that hold all of its code.
    """

    path: Path
    loaded: ctypes.CDLL
    entry: int
    base: int
    size: int

    @classmethod
    def load(cls, path: Path) -> Kernel:
        """Loads a library that `build.kernel_library` has built."""
        library()
        loaded = ctypes.CDLL(str(path))
        entry = ctypes.cast(loaded.mslemu_kernel, ctypes.c_void_p).value
        assert entry is not None
        size = path.stat().st_size + _PADDING
        kernel = cls(path, loaded, entry, _load_address(entry), size)
        weakref.finalize(kernel, _ctypes.dlclose, loaded._handle).atexit = False
        return kernel


@dataclass
class Outcome:
    """How a launch ended: `states` counts only after a deadlock."""

    report: Report
    states: ctypes.Array[ThreadState]


_states = (ThreadState * MAX_THREADS)()


def run(
    kernel: Kernel,
    buffers: Sequence[Placed],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
    trace: ctypes.Structure | None = None,
) -> Outcome:
    """Runs a grid of threads to its end or to its first fault.

    Args:
        kernel: The kernel.
        buffers: One for every memory parameter, in order.
        grid: Threads in x, y and z, all positive.
        threadgroup: Threads of a threadgroup, all positive, at most 1,024 together.
        options: How to run it.
        trace: For a traced kernel `tracing.Trace`, which is filled.

    Returns:
        The report of the run time; its fault is 0 if all went well.
    """
    addresses = (ctypes.c_void_p * max(1, len(buffers)))(*(b.address for b in buffers))
    launch = Launch(
        entry=kernel.entry,
        buffers=ctypes.addressof(addresses),
        grid=Coordinates(*grid),
        threadgroup=Coordinates(*threadgroup),
        seed=options.seed & (2**64 - 1),
        workers=min(options.workers, MAX_HOST_THREADS // options.resident),
        states=ctypes.addressof(_states),
        trace=None if trace is None else ctypes.addressof(trace),
        library=kernel.base,
        library_bytes=kernel.size,
        time_limit=int(min(options.time_limit * 1e9, 2**63)),
        resident=options.resident,
    )
    library().mslemu_launch(ctypes.byref(launch))
    return Outcome(launch.report, _states)
