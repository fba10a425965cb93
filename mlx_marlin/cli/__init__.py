"""The command line: `mlx-marlin COMMAND`, each command in a module of its own.

A command's module has `add_parser(subparsers)` and `run(args) -> int`, and is imported
only when it is asked for.
"""

import argparse
import os
import sys
from importlib import import_module

COMMANDS = {
    "plan": ("mlx_marlin.cli.plan", "show how a product would be computed"),
    "demo": ("mlx_marlin.cli.demo", "generate text through the Metal kernels"),
    "tune": ("mlx_marlin.cli.tune", "measure which plan is fastest here, and keep it"),
    "cache": ("mlx_marlin.cli.cache", "list, limit or clear the files that are kept"),
    "emulate": ("mlx_marlin.cli.emulate", "run one Metal kernel on the CPU"),
}
"""Command name -> (module, help), the only place that lists the commands."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: The arguments after the program's name; the process's own by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has enough. What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        print(f"mlx-marlin: error: {reason}", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    """Parses the arguments with the asked command's own parser, and runs it."""
    wanted = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="mlx-marlin",
        description="Quantized matrix products for MLX on Apple GPUs, and on NVIDIA's.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        if name == wanted:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    args = parser.parse_args(argv)
    status: int = import_module(COMMANDS[args.command][0]).run(args)
    return status
