"""Runs compilers with limits of time and memory.

A short text can make a compiler run for ever, or fill the memory: templates that double
at every step, macros, an initializer of a gigabyte, an endless file that it includes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

SECONDS = 60
"""A kernel takes 0.1 to 5 s (`benchmarks/emulator.py`), and a busy machine multiplies
that."""
MEMORY_BYTES = 4 << 30
"""Address space of a process, on Linux; macOS ignores this limit. zig's clang compiles
the probe of `compiler.py` in a tenth of it."""
FILE_BYTES = 256 << 20
"""Size of every file that is written; the precompiled header has a tenth of it."""

_SHELL = """
ulimit -v "$1" 2>/dev/null
ulimit -f "$2"
ulimit -t "$3"
shift 3
exec "$@"
"""
"""Units: 1,024 bytes, 512 bytes, seconds. The shell sets the limits because a function
that runs between fork and exec is unsafe in a process with threads."""


class RefusedError(Exception):
    """The compiler failed; the message is its output."""


class ExceededError(RefusedError):
    """The compiler was stopped at a limit."""


def run(command: tuple[str, ...], folder: Path | None = None, text: str = "") -> str:
    """Runs a compiler and returns what it prints."""
    limits = (MEMORY_BYTES // 1024, FILE_BYTES // 512, SECONDS)
    shell = ("/bin/sh", "-c", _SHELL, "sh", *map(str, limits))
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            (*shell, *command),
            cwd=folder,
            stdin=subprocess.PIPE,
            # A file, so that the limit holds for messages too.
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            _finish(process, text)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    if process.returncode < 0 or "out of memory" in output:
        raise ExceededError(_exceeded(process.returncode))
    if process.returncode:
        raise RefusedError(output)
    return output


def _finish(process: subprocess.Popen[bytes], text: str) -> None:
    """Waits for a process, and kills its group at the time limit or on an exception."""
    # A wait with a timeout polls every 50 ms, a sixth of a kernel's compile time.
    timer = threading.Timer(SECONDS, _kill, (process,))
    timer.start()
    try:
        process.communicate(text.encode())
    except BaseException:
        _kill(process)
        raise
    finally:
        timer.cancel()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with its group, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _exceeded(status: int) -> str:
    ended = f" (signal {-status})" if status < 0 else ""
    return (
        f"the compiler exceeds a limit{ended}: {SECONDS} s, {MEMORY_BYTES >> 20} MiB "
        f"of memory, {FILE_BYTES >> 20} MiB of a file"
    )
