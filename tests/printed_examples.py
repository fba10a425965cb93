"""Runs the examples, and writes what they print to their READMEs.

$ python tests/printed_examples.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(```console\n\$ python (examples/\w+/run\.py)\n)(.*?)(?=```)", re.DOTALL
)


def readmes() -> list[Path]:
    """Returns the READMEs that show a command and its output."""
    found = sorted(ROOT.glob("examples/*/README.md"))
    return [path for path in found if BLOCK.search(path.read_text(encoding="utf-8"))]


def printed(*arguments: str, folder: Path = ROOT) -> str:
    """Returns what Python prints, on the emulator and without tuned results.

    Args:
        *arguments: Arguments of the interpreter.
        folder: The current folder.

    Raises:
        RuntimeError: If it fails.
    """
    settings = {"MLX_MARLIN_BACKEND": "emulator", "MLX_MARLIN_TUNED": "0"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def page(text: str) -> str:
    """Returns a README with the output of its commands."""
    return BLOCK.sub(lambda block: block[1] + printed(block[2]), text)


if __name__ == "__main__":
    for readme in readmes():
        readme.write_text(page(readme.read_text(encoding="utf-8")), encoding="utf-8")
