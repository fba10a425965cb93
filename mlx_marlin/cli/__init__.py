"""The command line: `mlx-marlin COMMAND`, each command in a module of its own.

A command's module has `add_parser(subparsers)` and `run(args) -> int`, and is imported
only when it is asked for.
"""

import argparse
import sys
from importlib import import_module
from typing import Any

from mlx_marlin.cli import terminal

COMMANDS = {
    "plan": ("mlx_marlin.cli.plan", "show how a product would be computed"),
    "convert": (
        "mlx_marlin.cli.convert",
        "convert a checkpoint to our layout or MLX's",
    ),
    "tune": ("mlx_marlin.cli.tune", "measure which plan is fastest here, and keep it"),
    "doctor": ("mlx_marlin.cli.doctor", "check whether our kernels can run here"),
    "demo": ("mlx_marlin.cli.demo", "generate text through the Metal kernels"),
    "cache": ("mlx_marlin.cli.cache", "list, limit or clear the files that are kept"),
    "emulate": ("mlx_marlin.cli.emulate", "run one Metal kernel on the CPU"),
}
"""Command name -> (module, help), the most useful one first; the only list of them."""

WRONG_INPUT = 2
"""Exit status where the input is wrong, or something is missing."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a process that SIGINT ended."""
CLOSED_PIPE = 141
"""Exit status where the reader of the output is gone, as after SIGPIPE."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: The arguments after the program's name; the process's own by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    terminal.replace_unknown_characters()
    try:
        try:
            return _run(argv)
        finally:
            terminal.flush()  # here, where a closed pipe is no traceback
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        terminal.discard()
        return CLOSED_PIPE
    except MemoryError:
        terminal.complain("mlx-marlin: error: out of memory")
        return WRONG_INPUT
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        terminal.complain(f"mlx-marlin: error: {reason}")
        return WRONG_INPUT


class _Version(argparse.Action):
    """Prints the versions; they are looked up only where they are asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from mlx_marlin.cli.diagnosis import machine

        print(machine.version_line())
        parser.exit()


def _run(argv: list[str]) -> int:
    """Parses the arguments with the asked command's own parser, and runs it."""
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="mlx-marlin",
        description="Quantized matrix products for MLX on Apple GPUs, and on NVIDIA's.",
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="show the versions of mlx-marlin, MLX and mlx-lm, and exit",
    )
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, (module, text) in COMMANDS.items():
        if name == wanted:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    args = parser.parse_args(argv)
    status: int = import_module(COMMANDS[args.command][0]).run(args)
    return status
