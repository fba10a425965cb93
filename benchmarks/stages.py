"""Runs commands as stages of a longer run, none of which can end the others."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from mlx_marlin.measure.rows import Stage

TAIL = 4096
"""Bytes of each stream that are kept for the reason of a failure."""
LAST_LINES = 3
"""Lines of standard output that stand for the reason if standard error has none."""
BAR = re.compile(r"\d%\|")
"""A part of each progress bar."""
CHUNK = 1024


def run(
    name: str,
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> Stage:
    """Runs a command, passing its output on, and returns how it ended.

    Args:
        name: Name of the stage.
        command: Program and arguments.
        limit: Seconds after which it and its children are killed; none are left for a
            limit of 0, and the stage is skipped.
        environment: Variables to add.
    """
    if limit <= 0:
        return Stage(name=name, status="skipped", detail="no time was left")
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that children can be killed with it
        )
    except OSError as error:
        return Stage(name=name, status="failed", detail=f"cannot start: {error}")
    output, errors = bytearray(), bytearray()
    pumps = [
        _pumping(process.stdout, sys.stdout, output),
        _pumping(process.stderr, sys.stderr, errors),
    ]
    status = _status(process, limit)
    for pump in pumps:
        pump.join()
    return Stage(
        name=name,
        status=status,
        host_seconds=round(time.monotonic() - begun, 1),
        detail=""
        if status == "passed"
        else _reason(process.returncode, output, errors),
    )


def _status(process: subprocess.Popen[bytes], limit: float) -> str:
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        return "timed out"
    except BaseException:
        _kill(process)
        raise
    return "failed" if process.returncode else "passed"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pumping(
    source: IO[bytes] | None, target: IO[str], tail: bytearray
) -> threading.Thread:
    """Starts a thread that copies a stream and keeps its end."""

    def pump() -> None:
        assert source is not None
        with source:
            while chunk := os.read(source.fileno(), CHUNK):
                target.write(chunk.decode("utf-8", "replace"))
                target.flush()
                tail.extend(chunk)
                del tail[:-TAIL]

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    return thread


def _reason(status: int, output: bytearray, errors: bytearray) -> str:
    lines = _lines(errors)[-1:] or _lines(output)[-LAST_LINES:] or ["no message"]
    return f"exit status {status}: {'; '.join(lines)}"


def _lines(tail: bytearray) -> list[str]:
    """Returns the lines of a stream's end that are no progress bars."""
    text = tail.decode("utf-8", "replace").replace("\r", "\n")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not BAR.search(line)]
