"""What checks found, one file for each set of kernel variants.

A file lies in a folder of its machine (chip, OS build, MLX version) and is named after
the digest of the kernels, so another machine or another kernel text finds none. It says
"started" before the kernels run: if the process dies there, the next one reads a failed
check. A lock, which dies with its process, tells that from a check in progress.
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

from mlx_marlin import cache
from mlx_marlin.backends import registry

STATES = ("started", "passed", "failed", "undecided")
DIED = "the process ended during the check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check.

    Attributes:
        kernels: Names of the kernels that were checked together.
        state: One of `STATES`; "started" counts as failed. "undecided" holds for one
            process and is not written: the check failed for another reason than the
            kernel.
        fault: What was wrong; empty if nothing was.
        example: A plan or format that runs these variants, in words.
        date: Of the check, ISO 8601.
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
    """Returns the folder of all verdicts; it may not exist."""
    return cache.folder("verdicts")


def machine_folder(backend: str) -> Path:
    """Returns the folder of this machine's verdicts; it may not exist.

    Args:
        backend: "metal", "cuda" or "emulator".
    """
    return folder() / _machine(backend)


def checked(file: Path, started: Verdict, check: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict of a file; if it has none, checks and writes it.

    A verdict that cannot be written, or is undecided, is returned all the same.

    Args:
        file: Of these kernels on this machine.
        started: What to write before the kernels run.
        check: Runs them.
    """
    known = read(file)
    if known is not None and known.state != "started":
        return known
    try:
        cache.make(file.parent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return check()
    with os.fdopen(descriptor, "r+", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process checks the same kernels now
            return check()
        except OSError:
            # A file system without locks. "started" still tells a death; a check that
            # another process makes at the same moment would be taken for one.
            pass
        # It may have written its verdict since.
        known = read(file)
        if known is not None:
            return known
        return _check_and_keep(file, started, check)


def read(file: Path) -> Verdict | None:
    """Returns the verdict of a file.

    None if there is none, it cannot be understood, or others may have written it.
    """
    try:
        if cache.why_untrusted(file) is not None:
            return None
        return _parsed(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def write(file: Path, verdict: Verdict) -> None:
    """Keeps a verdict in the place of what the file says, if it can be written."""
    try:
        cache.make(file.parent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as opened:
            # In place: the lock is the file's, not the name's.
            opened.truncate()
            opened.write(json.dumps(asdict(verdict), indent=1) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
    except OSError:
        return


def kept(place: Path) -> dict[str, Verdict]:
    """Returns all verdicts of a machine's folder, by the digest of the kernels."""
    files = place.glob("*.json") if place.is_dir() else ()
    found = {file.stem: read(file) for file in files}
    return {digest: each for digest, each in found.items() if each is not None}


def _check_and_keep(
    file: Path, started: Verdict, check: Callable[[], Verdict]
) -> Verdict:
    write(file, started)
    try:
        verdict = check()
    except BaseException:  # an interrupt: nothing was found out
        _empty(file)
        raise
    if verdict.state == "undecided":
        _empty(file)
    else:
        write(file, verdict)
    return verdict


def _empty(file: Path) -> None:
    """Takes a verdict back. The file stays: others may wait for the lock on it."""
    with suppress(OSError):
        os.truncate(file, 0)


def _parsed(text: str) -> Verdict | None:
    try:
        data: Any = json.loads(text)
        return Verdict(**{name: str(data[name]) for name in Verdict.__slots__})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@lru_cache(8)
def _machine(backend: str) -> str:
    """Returns a name with the chip and a digest of all that machine code depends on.

    Beside a kernel's text these are chip, architecture, OS build and driver, and MLX.
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
