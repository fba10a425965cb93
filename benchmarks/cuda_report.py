"""What the benchmarks of a CUDA device share: the machine's facts, progress, JSON."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.backends import selection

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """Returns device, driver, versions, commit, date and command of this run."""
    driver = _output(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "driver": driver,
        "backend": selection.backend(),
        "mlx": mx.__version__,
        "python": sys.version.split()[0],
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def _output(*command: str) -> str | None:
    """Returns what a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def heading(facts: dict[str, Any]) -> str:
    return (
        f"{facts['device']}, driver {facts['driver'] or 'unknown'}, "
        f"MLX {facts['mlx']}, commit {facts['commit'] or 'unknown'}, {facts['date']}, "
        f"back end {facts['backend']}\n$ {facts['command']}"
    )


def host_milliseconds() -> float:
    """Returns what the host takes for a million turns of a loop that does nothing.

    Hosts that are lent change their speed by a factor of two from one second to the
    next: it stands beside what depends on it.
    """
    begun = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return (time.perf_counter() - begun) * 1e3


class Progress:
    """A bar on stderr, if that is a terminal and tqdm is installed."""

    def __init__(self, total: int, unit: str) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            self._bar = None
        else:
            self._bar = tqdm(total=total, unit=unit, file=sys.stderr, disable=None)

    def step(self, what: str, line: str | None = None) -> None:
        """Says what has been done, in the bar, and prints a line about it."""
        if line is not None:
            self.print(line)
        if self._bar is not None:
            self._bar.set_description(what)
            self._bar.update()

    def print(self, text: str) -> None:
        """Prints a line to stdout, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text)
        sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Laps:
    """Seconds of a run since its beginning, by what they were spent on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def total(self) -> float:
        return time.monotonic() - self._started

    def told(self) -> str:
        parts = (f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{self.total():.1f} s since the start: {', '.join(parts)}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as lines, columns as wide as their widest cell, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Writes a report whole or not at all; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)
