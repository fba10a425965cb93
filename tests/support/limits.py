"""A bound of the time and the memory of a block that may read a file without end."""

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import HANG_SECONDS

BYTES = 2**31


@contextmanager
def limited() -> Iterator[None]:
    """Raises AssertionError in what hangs, and MemoryError after 2 GiB more."""

    def end(*_: Any) -> None:
        raise AssertionError(f"not finished after {HANG_SECONDS:.0f} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    most = before[0]
    if sys.platform == "linux":  # macOS does not count so
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + BYTES
    handler = signal.signal(signal.SIGALRM, end)
    signal.alarm(int(HANG_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
