"""`mlx-marlin lm`: mlx-lm's own commands, with models that `optimize` converted."""

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any

from mlx_marlin.cli import arguments, models
from mlx_marlin.lm import measured_models
from mlx_marlin.lm.options import COMPUTE

LOADING = {"load_model", "load_tokenizer"}
"""mlx-lm's functions that read a model's files."""
OPTIONS = ("layout", "join", "trace", "compute")
GENERATE = ("generate", "chat", "server")
"""mlx-lm's commands that decode with its `stream_generate`."""
FAILED = 1
"""Exit status of Python for an error that mlx-lm does not catch."""

DESCRIPTION = "Run a command of mlx-lm on our kernels."
EPILOG = """
COMMAND is one of mlx-lm's, such as generate, chat, server, benchmark or evaluate; one
that it does not know is answered with all of them. What follows it are its own
arguments, unchanged; the options above come before it. Its exit status is returned.
MODEL may also be what mlx_marlin.load reads, such as a GGUF file. Commands that write
weights get MLX's layers. MLX_MARLIN_OPTIONS sets further options of
mlx_marlin.optimize.
Without any options, a model that `mlx-marlin tune` has measured gets the settings that
were fastest, and MLX_MAX_OPS_PER_BUFFER.

examples:
  mlx-marlin lm generate --model mlx-community/Qwen3-4B-4bit --prompt hello
  mlx-marlin lm --lookup chat --model mlx-community/Qwen3-4B-4bit
  mlx-marlin lm --heads auto --lookup generate --model FOLDER --prompt hello
  mlx-marlin lm --layout marlin --join server --model qwen3.gguf --port 8080
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.allow_abbrev = False  # arguments of mlx-lm are not ours to complete
    arguments.add_layout(parser)
    parser.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help="compute layers with the same input in one launch",
    )
    parser.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        help="compile each decoder block into cached graphs",
    )
    parser.add_argument(
        "--compute",
        choices=COMPUTE,
        help="compute models in bfloat16 in float16, for GPUs that emulate bfloat16",
    )
    parser.add_argument(
        "--lookup",
        action="store_true",
        help="draft what followed the last tokens earlier in the text, where it pays",
    )
    parser.add_argument(
        "--heads",
        metavar="PATH",
        help="draft with the model's own head, which is in a folder or a repository, "
        "or with auto in the model's folder",
    )
    parser.add_argument("lm_command", metavar="COMMAND", nargs="?")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace) -> int:
    """Runs a command of mlx-lm, and returns its exit status."""
    option = "--lookup" if args.lookup else "--heads" if args.heads else ""
    if option and args.lm_command not in GENERATE:
        raise ValueError(
            f"lm: {option} {args.lm_command}, expected one of {', '.join(GENERATE)}, "
            f"because other commands have no drafts"
        )
    if args.heads and any(
        each.partition("=")[0] == "--draft-model" for each in args.arguments
    ):
        raise ValueError("lm: --heads and --draft-model exclude each other: use one")
    model = measured_models.model_of(args.arguments)
    if model is not None:
        models.check(model)
    values = {name: getattr(args, name) for name in OPTIONS}
    options = {name: v for name, v in values.items() if v is not None}
    if not options:
        measured_models.set_for_model(args.arguments)  # before anything imports MLX

    from mlx_marlin.lm import auto as hook  # here, because it takes seconds

    if not option:
        hook.install(options, _tell)
        return _called(args.lm_command, args.arguments, model)
    from mlx_marlin.lm.drafts import install

    head_of = partial(install.attach_head, args.heads) if args.heads else None
    hook.install(options, _tell, head_of)
    said = _draft(args.lm_command, args.lookup)
    status = _called(args.lm_command, args.arguments, model)
    for line in said[-1:] if args.lm_command == "generate" else ():  # after its own
        _tell(line)
    return status


def _draft(command: str, lookup: bool) -> list[str]:
    """Lets a command of mlx-lm draft; returns where it will say what that gained."""
    from mlx_marlin.lm.drafts import install

    said: list[str] = []
    if command == "server":
        install.install(lookup=lookup, tell=_tell)
        install.serve_one_at_a_time()
    else:
        install.install(lookup=lookup, tell=said.append)
    return said


def _tell(line: str) -> None:
    # Not among the text that a model generates.
    print(f"mlx-marlin: {line}", file=sys.stderr)


def _functions(error: Exception) -> Iterator[CodeType]:
    """Yields the functions that an exception has left."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_code


def _called(command: str | None, arguments: Sequence[str], model: str | None) -> int:
    """Calls mlx-lm's command line, and returns the exit status."""
    from mlx_lm import cli

    main: Any = cli.main  # which has no annotations
    before = sys.argv
    words = [] if command is None else [command, *arguments]
    sys.argv = [f"mlx_lm.{command}", *words]  # as the command is called by itself
    try:
        main()
    except BrokenPipeError:
        raise
    except Exception as error:
        functions = [*_functions(error)]
        if functions[-1] is main.__code__:
            raise ValueError(f"lm: {error}") from error
        if type(error).__module__.startswith("huggingface_hub"):
            raise ValueError(f"the Hugging Face Hub did not answer: {error}") from error
        if model is not None and LOADING & {code.co_name for code in functions}:
            raise ValueError(f"cannot load the model {model!r}: {error}") from error
        # It is mlx-lm's; our caller would take it for wrong input.
        traceback.print_exc()
        return FAILED
    finally:
        sys.argv = before
    return 0
