"""Processes that compile kernels, which an interrupt ends before they are done."""

import atexit
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Process = subprocess.Popen[bytes]

_running: set[Process] = set()
_ended: set[Process] = set()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process does."""

    name: str  # What is the same for the same job in any process
    module: str  # Name of the module whose `work` takes the argument
    argument: bytes  # The argument, pickled

    @property
    def mark(self) -> str:
        """Name of the file that is in MLX's folder when the job is done."""
        return f"mlx_marlin-{hashlib.sha256(self.name.encode()).hexdigest()[:32]}.done"


class Ahead(Protocol):
    """The processes of some jobs, which compile what is needed later."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Starts the jobs that are not done."""

    def is_done(self, job: Job) -> bool:
        """Returns whether a job was done, by this or an earlier process."""

    def is_running(self, job: Job) -> bool:
        """Returns whether a job's process runs."""


class EndedError(Exception):
    """A process was ended by `end_all`."""


def start(command: Sequence[str], **options: Any) -> Process:
    """Starts a process; the options are those of `subprocess.Popen`.

    It is in a session of its own: a terminal's Ctrl-C reaches all processes of one, and
    an interrupted compiler looks like one that does not work.
    """
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, start_new_session=True, **options
    )
    _running.add(process)
    return process


def run(command: Sequence[str], given: bytes) -> bytes:
    """Runs a process, and returns its output."""
    process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    output, _ = process.communicate(given)
    _running.discard(process)
    if process in _ended:
        raise EndedError(command[0])
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output


def _let_go_on() -> None:
    """Lets processes outlive this one, without a warning that they do."""
    for process in _running:
        process.returncode = process.poll() or 0


atexit.register(_let_go_on)


def end_all() -> None:
    """Ends all processes that were started here and are not done."""
    for process in [*_running]:
        _ended.add(process)
        _running.discard(process)
        process.kill()
