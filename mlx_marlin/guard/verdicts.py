"""Stored verdicts of checks, one file for each set of kernel variants.

The folder of a file depends on the machine (chip, OS build, MLX version) and its name
on the digest of the kernels, so a verdict is never used for another machine or kernel.
The file contains "started" while a kernel is evaluated (`Mark`), and its lock is held
during the whole check. A process that finds "started" in a file that nobody has locked
checks the kernels again. If that ends the process too, they have failed, until this
package has another version.
"""

import atexit
import hashlib
import json
import os
import platform
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from mlx_marlin import cache, regular_files, versions
from mlx_marlin.backends import kernels, registry
from mlx_marlin.evidence import store
from mlx_marlin.warn_once import warn_once

FORMAT = 2
"""Changes with the fields of a verdict, so that older files are not read."""
STATES = ("started", "passed", "failed", "undecided")
MOST_UNFINISHED = 2
"""Checks that end their process, after which the kernels count as failed."""
DIED = "the process ended during the check, twice"
SUSPECTED = "a process ended during the check"
BUSY = "another process is evaluating it, or ended when it did"
ENDING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXCPU,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that end a process and that no kernel causes."""

_present: "dict[Mark, None]" = {}
"""The marks of this process that are in files."""
_handlers: dict[int, Any] = {}
"""The handlers that `_take_all_back` replaces now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check."""

    kernels: str  # names of the kernels that were checked together, with " and "
    # "started" is no result: a check is in progress or has ended its process.
    # "undecided" means that the check failed for a reason other than the kernel; it
    # holds for one process and is not written.
    state: str
    fault: str  # what was wrong; empty if nothing was
    example: str  # description of a plan or format that uses these variants
    date: str  # of the check, ISO 8601
    shaders: str  # `source.digest_of_shaders` of the version that used it last
    version: str  # of this package
    unfinished: int = 0  # checks that have ended their process, this one included

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r} is not one of {STATES}")

    @property
    def failure(self) -> str | None:
        """Why the kernels must not be used; None if they passed."""
        if self.state == "passed":
            return None
        return SUSPECTED if self.state == "started" else self.fault

    @property
    def names(self) -> list[str]:
        """The names of the kernels."""
        return self.kernels.split(" and ")


@lru_cache(1)
def version() -> str:
    """Returns the version of this package, or ""."""
    return versions.installed("mlx-marlin") or ""


def folder() -> Path:
    """Returns the folder of all verdicts, which may not exist."""
    return cache.folder("verdicts")


def machine_folder(backend: str) -> Path:
    """Returns the folder of this machine's verdicts, which may not exist."""
    return folder() / _machine(backend)


def checked(
    file: Path,
    started: Verdict,
    check: Callable[[], Verdict],
    suspected: Callable[[Verdict], None],
) -> Verdict:
    """Checks kernels and writes the verdict, unless another process has written one.

    `started` is in the file while the kernels run. `suspected` is called before kernels
    are checked that have ended a process. A verdict that is undecided or cannot be
    written is returned without writing.
    """
    with ExitStack() as stack:
        try:
            cache.make(file.parent)
            opened = stack.enter_context(cache.locked(file))
        except cache.LockedError as error:
            warn_once("not kept: verdict", f"a verdict is not kept: {error}")
            return _without_lock(read(file), started, check)
        except OSError:
            return _without_lock(read(file), started, check)
        known = read(file)
        if known is None:
            return _check_and_write(opened, b"", replace(started, unfinished=1), check)
        if known.state != "started":
            return known
        if known.unfinished >= MOST_UNFINISHED:
            return _write(opened, replace(known, state="failed", fault=DIED))
        suspected(known)
        started = replace(started, unfinished=known.unfinished + 1)
        return _check_and_write(opened, _text(known), started, check)


def read(file: Path) -> Verdict | None:
    """Returns the verdict of a file.

    None if there is none, it is invalid, other users may have written it, or the
    kernels failed in another version of this package.
    """
    try:
        if not file.stat().st_size:
            return None  # no check has come to an end
    except OSError:
        return None
    found = store.read(file, Verdict, "the verdict")
    holds = found and (found.state == "passed" or found.version == version())
    return found if holds else None


def write(file: Path, verdict: Verdict) -> None:
    """Replaces the content of a file by a verdict, if the file can be written."""
    try:
        cache.make(file.parent)
        with cache.open_to_write(file) as opened:
            _write(opened, verdict)
    except OSError:
        return


def stored(machine: Path) -> dict[str, Verdict]:
    """Returns all verdicts in a machine's folder by the digest of the kernels."""
    found = {file.stem: read(file) for file in machine.glob("*.json")}
    return {digest: verdict for digest, verdict in found.items() if verdict is not None}


def forget(kernel: str) -> int:
    """Removes the verdicts on a kernel on all machines, and returns their number."""
    found = {file: read(file) for file in folder().glob("*/*.json")}
    known = {name for each in found.values() if each for name in each.names}
    if kernel not in known:
        some = ", ".join(sorted(known)) or "none has one"
        shown = regular_files.quoted(kernel)
        raise ValueError(f"{shown}, expected a kernel with a verdict: {some}")
    chosen = [file for file, each in found.items() if each and kernel in each.names]
    for file in chosen:
        with cache.open_to_write(file) as opened:  # others may wait for its lock
            rewrite(opened, b"")
    return len(chosen)


def _without_lock(
    known: Verdict | None, started: Verdict, check: Callable[[], Verdict]
) -> Verdict:
    """Checks kernels whose file is locked for long, or cannot be written.

    One that is being evaluated, or has ended a process, is not run: the file would not
    tell the next process of it.
    """
    if known is None:
        return check()
    if known.state == "started":
        return replace(started, state="undecided", fault=BUSY)
    return known


def _check_and_write(
    opened: BinaryIO, before: bytes, started: Verdict, check: Callable[[], Verdict]
) -> Verdict:
    with kernels.watched(Mark(opened, _text(started), before).present):
        verdict = check()
    return verdict if verdict.state == "undecided" else _write(opened, verdict)


def _write(opened: BinaryIO, verdict: Verdict) -> Verdict:
    """Replaces a verdict in place: the lock belongs to the file, not to its name."""
    with suppress(OSError):  # a full device
        rewrite(opened, _text(verdict))
    return verdict


def _text(verdict: Verdict) -> bytes:
    return (json.dumps(asdict(verdict), indent=1) + "\n").encode()


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
    machine = FORMAT, chip, architecture, platform.system(), build, version
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return f"{name}-{digest}"


class Mark:
    """What an open file contains while a kernel is evaluated, and otherwise.

    It stays after an abort, a fault of the GPU, SIGKILL and a halt of the machine.
    Signals that people and schedulers end processes with take it back first, as do
    exceptions and the end of the interpreter. A signal reaches Python when MLX returns,
    and only in the main thread: one that ends the process during a check in another
    thread leaves the mark.
    """

    def __init__(self, file: BinaryIO, content: bytes, otherwise: bytes) -> None:
        self._file, self._content, self._otherwise = file, content, otherwise
        self._process = os.getpid()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Marks what is evaluated in the context."""
        try:
            _replace_handlers()
            self.put()
            yield
        finally:
            self.take_back()
            _restore_handlers()

    def put(self) -> None:
        """Writes the mark, so that it outlasts the process and the machine."""
        _present[self] = None  # before it is written: a signal may come in between
        self._write(self._content)

    def take_back(self) -> None:
        """Removes the mark."""
        self._write(self._otherwise)
        _present.pop(self, None)

    def _write(self, content: bytes) -> None:
        if self._process != os.getpid():
            return  # a forked child, which evaluates nothing
        with suppress(OSError, ValueError):  # a full device, a closed file
            rewrite(self._file, content)


def rewrite(file: BinaryIO, content: bytes) -> None:
    """Replaces the content of an open file, without a buffer that is written later."""
    if content:  # before the old one goes: a full device must not lose it
        os.pwrite(file.fileno(), content, 0)
    os.ftruncate(file.fileno(), len(content))
    if content:
        os.fsync(file.fileno())


def _take_all_back(number: int, frame: FrameType | None) -> None:
    """Handles a signal: removes all marks, then does what the signal did before."""
    marks = [*_present]
    for mark in marks:
        mark.take_back()
    before = _handlers.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)
    for mark in marks:  # the process goes on
        mark.put()


def _replace_handlers() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        before = signal.getsignal(number)
        # None is a handler that Python does not know.
        if before not in (None, signal.SIG_IGN, _take_all_back):
            _handlers[number] = before
            signal.signal(number, _take_all_back)


def _restore_handlers() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in [*_handlers]:
        signal.signal(number, _handlers[number])
        del _handlers[number]


@atexit.register
def _end() -> None:
    """Removes the marks of threads that end with the interpreter."""
    for mark in [*_present]:
        mark.take_back()
