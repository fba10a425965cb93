"""The command line: `mlx-marlin COMMAND`, one module per command.

The module of a command defines `DESCRIPTION`, `EPILOG`, `add_arguments(parser)` and
`run(args) -> int`. It is imported only when the command is used.
"""

import argparse
import sys
from importlib import import_module
from typing import Any

from mlx_marlin.cli import output

COMMANDS = {
    "plan": "show the plan of a matrix product",
    "convert": "import GPTQ, AWQ, GGUF and other checkpoints",
    "verify": "compare a model's layers with exact results",
    "tune": "measure plans on this machine, keep the fastest",
    "report": "show who serves each layer of a model",
    "profile": "compare products with the limits of a device",
    "bench": "time our kernels and stock MLX on this machine",
    "render": "show results as an HTML page or a picture",
    "doctor": "check whether our kernels can run here",
    "lm": "run mlx-lm's own commands on our kernels",
    "demo": "generate text with quantized kernels",
    "cache": "list, limit or clear the cache",
    "emulate": "run a Metal kernel on the CPU",
}
"""Command name -> help, in the order of the help. Its module has the same name."""

GUIDE = {
    "check that kernels run here": "mlx-marlin doctor",
    "see a model write text": "mlx-marlin demo",
    "serve a model with mlx-lm": "mlx-marlin lm server --model MODEL",
    "use a GPTQ, AWQ or GGUF model": "mlx-marlin convert SOURCE RESULT",
    "check a converted model": "mlx-marlin verify MODEL",
    "see who serves a model's layers": "mlx-marlin report MODEL",
    "see why a kernel is chosen": 'mlx-marlin plan 8x4096x4096 --chip "M3 Max"',
    "compare times with the limits": "mlx-marlin profile",
    "measure and keep faster plans": "mlx-marlin tune MODEL",
    "measure against stock MLX": "mlx-marlin bench",
    "see a result in a browser": "mlx-marlin render RESULT.json -o result.html",
    "run a Metal kernel without a GPU": "mlx-marlin emulate FILE --grid 32",
    "see and free disk space": "mlx-marlin cache",
}
"""What a newcomer wants -> the command for it, in the order of need."""
_WIDTH = max(map(len, GUIDE))
EPILOG = "\n".join(
    [
        "what you want:",
        *(f"  {wish:{_WIDTH}}  {command}" for wish, command in GUIDE.items()),
        "",
        "Run `mlx-marlin COMMAND --help` for the options of a command.",
    ]
)

WRONG_INPUT = 2
"""Exit status for invalid input or a missing dependency."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as after SIGINT."""
CLOSED_PIPE = 141
"""Exit status if the reader has closed the output, as after SIGPIPE."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    output.replace_unknown_characters()
    try:
        try:
            return _run(argv)
        finally:
            output.flush()  # here, so that a closed pipe is caught below
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        output.discard()
        return CLOSED_PIPE
    except MemoryError:
        output.print_error("mlx-marlin: error: out of memory")
        return WRONG_INPUT
    except ImportError as error:
        from mlx_marlin.cli import installation

        output.print_error(f"mlx-marlin: error: {installation.why_missing(error)}")
        return WRONG_INPUT
    except (ValueError, OSError) as error:
        output.print_error(f"mlx-marlin: error: {reason_of(error)}")
        return WRONG_INPUT


def reason_of(error: Exception) -> str:
    """Returns an error's message in one line; a file that is missing comes first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class _Version(argparse.Action):
    """Prints the versions, which are read only for this option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from mlx_marlin.cli import installation

        print(installation.version_line())
        parser.exit()


def _run(argv: list[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    args = _parser(command).parse_args(argv)
    with output.instead_of_text(args):
        status: int = _module(args.command).run(args)
    return status


def _module(command: str) -> Any:
    return import_module(f"mlx_marlin.cli.{command}")


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows the arguments of one command."""
    parser = argparse.ArgumentParser(
        prog="mlx-marlin",
        description="Quantized matrix products for MLX on Apple and NVIDIA GPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    for name, text in COMMANDS.items():
        added = subparsers.add_parser(
            name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == command:
            found = _module(name)
            added.description, added.epilog = found.DESCRIPTION, found.EPILOG
            found.add_arguments(added)
    return parser
