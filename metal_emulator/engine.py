"""Loads compiled kernels and launches them in the runtime library."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metal_emulator.language import lines
from metal_emulator.memory import MappedArgument
from metal_emulator.modes import Options
from metal_emulator.native import (
    Coordinates,
    Copy,
    Launch,
    Python,
    Report,
    ThreadState,
    library,
)

MAX_THREADS = 1024
MAX_HOST_THREADS = 1024
"""As in memory.cpp; resident threadgroups count."""


class _SymbolInfo(ctypes.Structure):
    """The result of dladdr."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
    ]


def _load_address(entry: int) -> int:
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(entry), ctypes.byref(info))
    return int(info.base)


_PADDING = 1 << 20
"""Upper bound of how much larger a loaded library is than its file."""


@dataclass
class Kernel:
    """A loaded kernel.

    Attributes:
        path: The library's file.
        loaded: The loaded library.
        entry: Address of the function that runs one thread.
        base: Address at which the library is loaded.
        size: Bytes from `base` that include all of its code.
        copies: Return addresses of copied code, with the one that stands for them all.
    """

    path: Path
    loaded: ctypes.CDLL
    entry: int
    base: int
    size: int
    copies: dict[int, int] = field(default_factory=dict)

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

    def learns_copy(self, report: Report) -> bool:
        """Returns whether a fault tells of a copy that the next launch will know.

        The compiler may copy a call or a store into two branches. Lanes that meet there
        come from one place in the source, although their return addresses differ.
        """
        site, other = (self.copies.get(a, a) for a in (report.site, report.other_site))
        # A call precedes its return address.
        offsets = [address - self.base - 1 for address in (site, other)]
        if site == other or not all(0 <= offset < self.size for offset in offsets):
            return False
        places = lines.places(self.path, offsets)
        if places[0] is None or places[0] != places[1]:
            return False
        self.copies |= {a: other for a, place in self.copies.items() if place == site}
        self.copies[site] = other
        return True


@dataclass
class Outcome:
    """The result of a launch; `states` is valid only after a deadlock."""

    report: Report
    states: ctypes.Array[ThreadState]


_python = Python.of_this_process()
_states = (ThreadState * MAX_THREADS)()


def _runs_handlers() -> bool:
    """Returns whether Python runs the handlers of signals in this thread."""
    return threading.current_thread() is threading.main_thread()


def run(
    kernel: Kernel,
    buffers: Sequence[MappedArgument],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
    trace: ctypes.Structure | None = None,
) -> Outcome:
    """Runs a grid of threads until it ends or a fault occurs."""
    addresses = (ctypes.c_void_p * max(1, len(buffers)))(*(b.address for b in buffers))
    known = (Copy(*pair) for pair in kernel.copies.items())
    copies = (Copy * len(kernel.copies))(*known)
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
        python=ctypes.addressof(_python) if _runs_handlers() else None,
        copies=ctypes.addressof(copies),
        copy_count=len(copies),
    )
    library().mslemu_launch(ctypes.byref(launch))
    if launch.raised[0]:
        # Its references become the interpreter's, which raises it here.
        ctypes.pythonapi.PyErr_Restore(*map(ctypes.c_void_p, launch.raised))
    return Outcome(launch.report, _states)
