"""Makes the text and the pictures of README.md anew, from the commands on it.

$ python examples/seven_tiles/make.py
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from mlx_marlin.cli.main import main

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"(```console\n\$ mlx-marlin ([^\n]*)\n).*?(?=```)", re.DOTALL)


def page(text: str) -> str:
    """Runs the commands of a page in the current folder.

    Args:
        text: The page, in Markdown.

    Returns:
        The page, under each command what it printed.
    """
    return BLOCK.sub(lambda block: block[1] + printed(block[2]), text)


def printed(arguments: str) -> str:
    """Returns what a command prints, which must succeed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(shlex.split(arguments))
    if status:
        raise RuntimeError(f"mlx-marlin {arguments} ended with {status}")
    return output.getvalue()


if __name__ == "__main__":
    os.chdir(FOLDER)
    readme = Path("README.md")
    readme.write_text(page(readme.read_text(encoding="utf-8")), encoding="utf-8")
