"""The runtime library: its C structures and functions."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator

from metal_emulator.compiling import build, compiler
from metal_emulator.errors import EmulatorError

MAX_TRACE = 24


class Coordinates(ctypes.Structure):
    """x, y, z, as in abi.h."""

    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def __iter__(self) -> Iterator[int]:
        yield from (self.x, self.y, self.z)


class Report(ctypes.Structure):
    """The first fault of a launch, as in runtime.h."""

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
        ("site", ctypes.c_uint64),
        ("other_site", ctypes.c_uint64),
        ("other_thread", ctypes.c_uint32),
        ("other_is_write", ctypes.c_uint32),
        ("other_threadgroup", Coordinates),
    ]


class ThreadState(ctypes.Structure):
    """The state of a thread and the address at which it waits, as in runtime.h."""

    _fields_ = [
        ("activity", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("site", ctypes.c_uint64),
        ("operation", ctypes.c_char_p),
    ]


class Python(ctypes.Structure):
    """Functions of the interpreter that the runtime calls, as in runtime.h."""

    _fields_ = [
        ("ensure", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("check_signals", ctypes.c_void_p),
        ("fetch", ctypes.c_void_p),
    ]

    @classmethod
    def of_this_process(cls) -> Python:
        """Returns the functions of this interpreter."""
        names = ("GILState_Ensure", "GILState_Release", "Err_CheckSignals", "Err_Fetch")
        functions = (getattr(ctypes.pythonapi, f"Py{name}") for name in names)
        return cls(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))


class Copy(ctypes.Structure):
    """A return address, and the one that stands for its place, as in runtime.h."""

    _fields_ = [("site", ctypes.c_uint64), ("place", ctypes.c_uint64)]


class Launch(ctypes.Structure):
    """The arguments of a launch, as in runtime.h."""

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
        ("python", ctypes.c_void_p),
        ("raised", ctypes.c_void_p * 3),
        ("float_mode", ctypes.c_uint64),
        ("due", ctypes.c_uint32),
        ("copies", ctypes.c_void_p),
        ("copy_count", ctypes.c_uint64),
    ]


class Region(ctypes.Structure):
    """A block of guarded memory, as in memory.cpp."""

    _fields_ = [
        ("host", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the runtime library, loaded with global symbols for the kernels.

    Raises:
        EmulatorError: If no compiler works on this machine.
    """
    found = compiler.find()
    if found is None:
        raise EmulatorError(
            f"no Metal kernel can be compiled: {compiler.unavailable()}"
        )
    if sys.platform.startswith("linux"):
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(build.runtime_library(found)), mode=ctypes.RTLD_GLOBAL)
    _declare_functions(loaded)
    return loaded


def _declare_functions(loaded: ctypes.CDLL) -> None:
    region, size = ctypes.POINTER(Region), ctypes.c_uint64
    loaded.mslemu_place.restype = ctypes.c_void_p
    loaded.mslemu_place.argtypes = [region, ctypes.c_void_p, size, ctypes.c_uint32]
    loaded.mslemu_region_open.argtypes = [region, size, ctypes.c_int]
    loaded.mslemu_region_close.argtypes = [region]
    loaded.mslemu_canary.argtypes = [region, size, ctypes.c_uint32]
    loaded.mslemu_launch.argtypes = [ctypes.POINTER(Launch)]
    loaded.mslemu_launch.restype = ctypes.c_uint32
