"""The process `python -m metal_emulator`: its parser, errors and exit status."""

import argparse
import contextlib
import os
import sys

PROGRAM = "python -m metal_emulator"
WRONG_INPUT = 2
"""Exit status for invalid input or a missing dependency."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as after SIGINT."""
CLOSED_PIPE = 141
"""Exit status if the reader has closed the output, as after SIGPIPE."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 after a fault of the kernel."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is caught below
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Otherwise the interpreter would print a traceback when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except (ValueError, OSError, ImportError) as error:
        with contextlib.suppress(OSError):
            message = f"{PROGRAM}: error: {reason_of(error)}"
            print(message, file=sys.stderr, flush=True)
        return WRONG_INPUT


def reason_of(error: Exception) -> str:
    """Returns an error's message in one line; a file that is missing comes first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _run(argv: list[str] | None) -> int:
    # Imported here, because it needs the extra `emulator`.
    from metal_emulator.command_line import command

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=command.DESCRIPTION,
        epilog=command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(argv))
