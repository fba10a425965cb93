"""Stored verdicts of checks, one file for each set of kernel variants.

The folder of a file depends on the machine (chip, OS build, MLX version) and its name
on the digest of the kernels, so a verdict is never used for another machine or kernel.
The file contains "started" while the kernels run. If the process ends during a check,
the next process finds "started" and treats the check as failed. A file lock, which is
released when its process ends, distinguishes that from a check in progress.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_marlin import cache, regular_files
from mlx_marlin.backends import registry

STATES = ("started", "passed", "failed", "undecided")
DIED = "the process ended during the check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check.

    Attributes:
        kernels: Names of the kernels that were checked together.
        state: One of `STATES`. "started" counts as failed. "undecided" means that the
            check failed for a reason other than the kernel; it holds for one process
            and is not written.
        fault: What was wrong; empty if nothing was.
        example: Description of a plan or format that uses these variants.
        date: Date of the check, ISO 8601.
        shaders: `source.digest_of_shaders` of the version that used it last.
    """

    kernels: str
    state: str
    fault: str
    example: str
    date: str
    shaders: str

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r} is not one of {STATES}")

    @property
    def failure(self) -> str | None:
        """Why the kernels must not be used; None if they passed."""
        if self.state == "passed":
            return None
        return DIED if self.state == "started" else self.fault


def folder() -> Path:
    """Returns the folder of all verdicts, which may not exist."""
    return cache.folder("verdicts")


def machine_folder(backend: str) -> Path:
    """Returns the folder of this machine's verdicts, which may not exist.

    Args:
        backend: "metal", "cuda" or "emulator".
    """
    return folder() / _machine(backend)


def checked(file: Path, started: Verdict, check: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict of a file; if there is none, runs the check and writes it.

    A verdict that is undecided or cannot be written is returned without writing.

    Args:
        file: File of the kernels on this machine.
        started: Verdict to write before the kernels run.
        check: Runs the kernels and returns the verdict.
    """
    known = read(file)
    if known is not None and known.state != "started":
        return known
    try:
        cache.make(file.parent)
        opened = cache.open_to_write(file)
    except (OSError, ValueError):
        return check()
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is checking the same kernels
            return check()
        except OSError:
            # A file system without locks: "started" still marks an ended process, but
            # a check in progress in another process is mistaken for one.
            pass
        # Another process may have written its verdict in the meantime.
        known = read(file)
        if known is not None:
            return known
        return _check_and_write(file, started, check)


def read(file: Path) -> Verdict | None:
    """Returns the verdict of a file.

    None if there is none, it is invalid, or other users may have written it.
    """
    try:
        if cache.why_untrusted(file) is not None:
            return None
        return _parsed(regular_files.read(file))
    except (OSError, ValueError):
        return None


def write(file: Path, verdict: Verdict) -> None:
    """Replaces the content of a file by a verdict, if the file can be written."""
    try:
        cache.make(file.parent)
        with cache.open_to_write(file) as opened:
            # In place, because the lock belongs to the file and not to its name.
            opened.truncate()
            opened.write((json.dumps(asdict(verdict), indent=1) + "\n").encode())
            opened.flush()
            os.fsync(opened.fileno())
    except (OSError, ValueError):
        return


def stored(machine: Path) -> dict[str, Verdict]:
    """Returns all verdicts in a machine's folder by the digest of the kernels."""
    files = machine.glob("*.json") if machine.is_dir() else ()
    found = {file.stem: read(file) for file in files}
    return {digest: verdict for digest, verdict in found.items() if verdict is not None}


def _check_and_write(
    file: Path, started: Verdict, check: Callable[[], Verdict]
) -> Verdict:
    write(file, started)
    try:
        verdict = check()
    except BaseException:  # interrupted without a verdict
        _empty(file)
        raise
    if verdict.state == "undecided":
        _empty(file)
    else:
        write(file, verdict)
    return verdict


def _empty(file: Path) -> None:
    """Removes a verdict. The file stays, because others may wait for its lock."""
    with suppress(OSError):
        os.truncate(file, 0)


def _parsed(text: bytes) -> Verdict | None:
    try:
        data: Any = json.loads(text)
        return Verdict(**{name: str(data[name]) for name in Verdict.__slots__})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@lru_cache(8)
def _machine(backend: str) -> str:
    """Returns a folder name: the chip and a digest of what machine code depends on.

    Besides the kernel these are chip, architecture, OS build, driver and MLX.
    """
    import mlx.core as mx

    gpu = mx.Device(mx.gpu)
    info = mx.device_info(gpu) if mx.is_available(gpu) else {}
    chip = str(info.get("device_name", backend))
    architecture = str(info.get("architecture", platform.machine()))
    version = str(mx.__version__)  # type: ignore[attr-defined]
    build = registry.named(backend).system_build()
    machine = chip, architecture, platform.system(), build, version
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return f"{name}-{digest}"
