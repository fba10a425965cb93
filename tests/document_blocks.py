"""The code blocks of the documents: what they hold and how they run.

A page's Python blocks run one after another, with the same names, in one folder; its
commands in another. `support.stand_ins` puts what the page names into both. Comments
before a block say what is different:

    <!-- needs: gpu -->          it cannot run here (`command_names.NEEDS`)
    <!-- raises: ValueError -->  Python that ends with this error

Output that a page shows is compared: the lines below a command, "prints `...`" below
Python, and the indented text below Python that raises. "..." stands for anything.

$ python tests/document_blocks.py [PAGE...]    # writes what commands print anew
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_marlin import tables
from mlx_marlin.cli import main as cli
from support import stand_ins

ROOT = Path(__file__).parent.parent
PAGES = [
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "examples/*/README.md",
        "metal_emulator/README.md",
    )
    for path in sorted(ROOT.glob(pattern))
]
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>needs|raises): (?P<value>\w+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```\n",
    re.DOTALL | re.MULTILINE,
)
COMMAND = re.compile(
    r"^(?:\$ |(?:\w+=\S+ )*(?:mlx-marlin|python|pip|make|cd|\S*/python) )", re.MULTILINE
)
"""How a line with a command begins, in a block that names no language."""
LANGUAGES = ("python", "console", "sh", "", "text", "json", "cpp", "metal")
"""Languages of blocks. What is neither Python nor a command does not run."""
PRINTS = re.compile(r"\s*prints `(.*?)`")
RUNS_LONG = re.compile(r"^mlx-marlin (bench|tune|lm) ")
"""Commands that get `stand_ins.ARGUMENTS`."""
SETTINGS = {
    "MLX_MARLIN_BACKEND": "emulator",
    "MLX_MARLIN_TUNED": "0",
    "COLUMNS": str(tables.PIPED),
}
"""The environment of programs that a page starts."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a console block."""

    words: str  # The command without its prompt, on one line
    shown: str  # The output that the page shows; empty if it shows none


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block."""

    place: str  # Page and line
    language: str  # "python" or "console"
    text: str  # What it holds, without indentation
    mark: str  # "needs" or "raises", or "" without a mark
    value: str  # What the mark says
    after: str  # The page's text behind the block

    @property
    def commands(self) -> list[Command]:
        """The commands of a console block."""
        text = self.text.replace("\\\n", " ")
        if "$ " not in text:
            return [Command(words=each, shown="") for each in text.splitlines()]
        found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
        return [Command(words=words, shown=shown) for words, shown in found]


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page that hold Python or commands."""
    text = page.read_text(encoding="utf-8")
    return [*parsed(text, page.relative_to(ROOT).as_posix())]


def parsed(text: str, page: str) -> Iterator[Block]:
    """Yields the blocks of a page's text that hold Python or commands."""
    for found in BLOCK.finditer(text):
        language = found["language"]
        if language not in LANGUAGES:
            raise ValueError(f"{page}: {language!r} is not one of {[*LANGUAGES]}")
        if language == "sh" or (not language and COMMAND.search(found["text"])):
            language = "console"
        if language in ("python", "console"):
            line = text.count("\n", 0, found.start("text"))
            yield Block(
                place=f"{page}:{line}",
                language=language,
                text=re.sub(f"^{found['indent']}", "", found["text"], flags=re.M),
                mark=found["mark"] or "",
                value=found["value"] or "",
                after=text[found.end() :],
            )


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Runs a Python block in the current folder."""
    output = io.StringIO()
    code = compile(block.text, block.place, "exec")
    try:
        with contextlib.redirect_stdout(output):
            exec(code, names)
    except Exception as error:
        if block.mark != "raises" or type(error).__name__ != block.value:
            raise
        lines = f"{block.value}: {error}".splitlines()
        shown = "\n".join("    " + line for line in lines)
        assert shown in block.after, f"{block.place} shows something else:\n{shown}"
        return
    assert block.mark != "raises", f"{block.place} raises nothing"
    if prints := PRINTS.match(block.after):
        assert output.getvalue().strip() == prints[1], block.place


def run_command(command: str) -> str:
    """Runs a command in the current folder, and returns what it prints.

    `mlx-marlin` and `cd` run in this process, other programs in one of their own.
    """
    words, _, file = command.partition(" > ")
    split = [
        stand_ins.ARGUMENTS.get(each, each) if RUNS_LONG.search(words) else each
        for each in shlex.split(words, comments=True)
    ]
    if split[0] == "cd":
        os.chdir(split[1])
        return ""
    if split[0] == "mlx-marlin":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = cli.main(split[1:])
        printed = output.getvalue()
    else:
        status, printed = _subprocess(words)
    if status:
        raise RuntimeError(f"{command} ended with {status}:\n{printed}")
    if file:
        Path(file.partition("#")[0].strip()).write_text(printed, encoding="utf-8")
        return ""
    return printed


def run_block(block: Block) -> Iterator[tuple[Command, str]]:
    """Runs the commands of a block, and yields what each prints.

    A `cd` holds until the end of the block.
    """
    with contextlib.chdir(Path.cwd()):
        for command in block.commands:
            yield command, run_command(command.words)


def _subprocess(command: str) -> tuple[int, str]:
    python = shlex.quote(sys.executable)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-c", re.sub(r"(?<!\S)(\.venv/bin/)?python ", f"{python} ", command)],
        env=os.environ | SETTINGS | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
    )
    return done.returncode, done.stdout


def is_shown(printed: str, shown: str) -> bool:
    """Returns whether a page shows what was printed; "..." stands for anything."""
    pattern = re.escape(shown.strip()).replace(r"\.\.\.", ".*")
    return not shown.strip() or bool(re.fullmatch(pattern, printed.strip(), re.DOTALL))


@contextlib.contextmanager
def folder_of(page: Path) -> Iterator[Path]:
    """Enters a new folder that holds what a page names, and yields it."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
        for name in ("examples", "benchmarks", "tests"):
            Path(name).symlink_to(ROOT / name)
        stand_ins.write(Path(path), text)
        yield Path(path)


def rewritten(page: Path) -> str:
    """Returns a page with what its commands print, and writes files that it shows."""

    def run(found: re.Match[str]) -> str:
        (block,) = parsed(found[0], page.name)
        if block.mark or not any(each.shown for each in block.commands):
            return found[0]
        text = found["text"]
        for command, printed in run_block(block):
            if not is_shown(printed, command.shown):
                text = text.replace(command.shown, printed)
        return found[0].replace(found["text"], text)

    with folder_of(page) as folder:
        text = BLOCK.sub(
            lambda found: run(found) if [*parsed(found[0], "")] else found[0],
            page.read_text(encoding="utf-8"),
        )
        for file in made(page, folder):
            (page.parent / file.name).write_bytes(file.read_bytes())
    return text


def made(page: Path, folder: Path) -> list[Path]:
    """Returns the pictures in a folder that a page shows."""
    text = page.read_text(encoding="utf-8")
    return [each for each in sorted(folder.glob("*.svg")) if f"({each.name})" in text]


if __name__ == "__main__":
    os.environ |= SETTINGS
    for argument in map(Path, sys.argv[1:] or PAGES):
        argument = argument.resolve()
        argument.write_text(rewritten(argument), encoding="utf-8")
