"""Whether what documents tell to run exists: commands, options, targets, programs.

It is checked of blocks that do not run in the quick profile, or here, and of commands
in sentences.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

from document_blocks import ROOT, Block
from mlx_marlin.cli import main as cli

NEEDS = {
    "gpu": "a GPU, which the gate's machine lacks",
    "hours": "longer than a test may take",
    "machines": "several machines",
    "network": "packages from the network",
}
"""What a block may need, by the word of its mark."""
INLINE = re.compile(r"`((?:mlx-marlin|python|pip|make) [^`]+)`")
"""A command in a sentence."""


def fault(block: Block) -> str | None:
    """Returns what is wrong with a block that does not run, as far as can be told.

    Its Python has to compile, and what its commands name has to exist: our commands
    and their options, targets of the Makefile, modules, files and extras.
    """
    if block.mark == "needs" and block.value not in NEEDS:
        return f"needs {block.value!r}, expected one of {[*NEEDS]}"
    if block.language == "python":
        compile(block.text, block.place, "exec")
        return None
    found = (_command_fault(command.words) for command in block.commands)
    return next(filter(None, found), None)


def _command_fault(command: str) -> str | None:
    words = shlex.split(command, comments=True)
    words = [*words[[("=" in each) for each in words].index(False) :]]
    name, *rest = words
    if name == "mlx-marlin":
        try:
            cli._parser(rest[0]).parse_args(rest)
        except SystemExit:
            return f"{command}: not a command of ours"
    if name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
        unknown = [each for each in rest if "=" not in each and each not in targets]
        return f"{command}: no target {unknown}" if unknown else None
    if name == "pip":
        return _extras_fault(command)
    if name.endswith("python"):
        return _program_fault(rest)
    return None


def inline_faults(page: Path) -> list[str]:
    """Returns what is wrong with the commands in the sentences of a page.

    They may have placeholders, so only names are checked: of commands and options of
    ours, of targets, modules, files and extras.
    """
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = (
        _options_fault(command)
        if command.startswith("mlx-marlin")
        else _command_fault(command)
        for command in INLINE.findall(text)
    )
    return [*filter(None, found)]


def _options_fault(command: str) -> str | None:
    name, *rest = shlex.split(command)[1:]
    if name == "...":
        return None
    if name not in cli.COMMANDS:
        return f"{command}: not a command of ours"
    if name == "lm" and (own := [each for each in rest if each[0] != "-"]):
        rest = rest[: rest.index(own[0])]  # what follows is mlx-lm's
    given = {each for each in rest if each.startswith("--")}
    unknown = given - options(name)
    return f"{command}: no options {unknown}" if unknown else None


@cache
def options(command: str) -> set[str]:
    """Returns the options of a command of ours."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return {*re.findall(r"--[a-z][\w-]*", output.getvalue())}


def _extras_fault(command: str) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = project["project"]["optional-dependencies"]
    named = ",".join(re.findall(r"\.\[(.*?)\]", command)).split(",")
    unknown = {*filter(None, named)} - {*known}
    return f"{command}: no extras {unknown}" if unknown else None


def _program_fault(words: list[str]) -> str | None:
    if words[0] == "-m":
        found = importlib.util.find_spec(words[1]) is not None
        return None if found else f"no module {words[1]}"
    missing = "/" in words[0] and not (ROOT / words[0]).is_file()
    return f"no file {words[0]}" if missing else None
