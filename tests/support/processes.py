"""Processes of tests, and when a test takes one for one that never ends.

What else hangs meets `faulthandler_timeout` of pyproject.toml.
"""

import subprocess
import sys

HANG_SECONDS = 600.0
"""Many times what the slowest process takes on a busy machine."""


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
