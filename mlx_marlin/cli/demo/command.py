"""`mlx-marlin demo`: generates text and compares it with stock MLX."""

import argparse
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import progress, state
from mlx_marlin.backends import launcher, selection
from mlx_marlin.cli import arguments, models

if TYPE_CHECKING:
    from mlx_marlin.cli.demo.generation import Generation

MODEL_FOLDERS = (
    Path(__file__).parent / "model",
    Path(__file__).parents[3] / "examples" / "tiny_llama" / "model",
)
"""Where the demo's own model is: in the installed package or in the checkout."""

HELD_OUT_MODULES = (
    "bisect",
    "calendar",
    "configparser",
    "fractions",
    "graphlib",
    "heapq",
    "queue",
    "sched",
    "shlex",
    "textwrap",
)
"""Modules of the standard library that the demo's model was not trained on."""

WINDOWS, WINDOW = 4, 128
"""Windows of held-out text for the perplexity, and tokens predicted in each."""

CHARACTERS = 16
"""An upper bound of the average characters of a token in lines of code."""

MAX_TOKENS = 4096
"""Upper limit of --tokens."""
MAX_PROMPTS = 1024
"""Upper limit of --batch: every prompt has its own KV cache."""

DESCRIPTION = "Generate text with a 4-bit model, and compare it with stock MLX."
EPILOG = """
The exit status is 1 if the output differs from stock MLX by more than rounding, or if
no kernel of this package ran.

examples:
  mlx-marlin demo
  mlx-marlin demo --model mlx-community/Qwen3-4B-4bit --tokens 16 --batch 1
"""

PROMPTS = (
    "def main():\n    parser = argparse.",
    "    def close(self):\n        if self.",
    'def get_name(self):\n    """Return ',
    "async def fetch(url):\n    ",
    "def is_prime(n):\n    ",
    "def __getitem__(self, index):\n    if ",
    "while True:\n    line = ",
    "def read_lines(path):\n    with open(path, ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of every model of the demo.

    Attributes:
        batches: Prompts of equal length: tokens of shape `(batch, length)`.
        count: Tokens to generate for each prompt.
        text: Held-out tokens of shape `(windows, length + 1)`.
    """

    batches: list[mx.array]
    count: int
    text: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a model: a generation for each batch, and its perplexity."""

    label: str
    generations: "list[Generation]"
    perplexity: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name or folder of an mlx-lm model; default: the demo's own model",
    )
    arguments.add_layout(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        default=32,
        help=f"tokens to generate for each prompt, 2 to {MAX_TOKENS}; default: 32",
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 4, 8],
        help=f"prompts at once, 1 to {MAX_PROMPTS}; default: 1 4 8",
    )
    arguments.add_dtype(parser, "the model's")
    parser.add_argument("--plans", action="store_true", help="list the plans that ran")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 1 if a result is wrong or our kernels did not run."""
    check(args)
    if args.model:
        models.check(args.model)
    backend = selection.backend()
    if backend in selection.ON_GPU:
        with _forced(backend):
            return _demo(args)
    return _demo(args)


def _demo(args: argparse.Namespace) -> int:
    from mlx_marlin.cli.demo import report

    name = args.model or str(checkpoint())
    model, tokenizer = models.load(name)
    if args.dtype:
        model.set_dtype(getattr(mx, args.dtype))
    prompts = prompt_tokens(tokenizer, max(args.batch))
    work = Work(
        batches=[prompts[:batch] for batch in args.batch],
        count=args.tokens,
        text=held_out_tokens(tokenizer),
    )
    print(report.opening(name, model, args.layout))
    outcomes = measure_all(model, work, args.layout)
    stock, ours = outcomes[-2:]
    for batch in zip(work.batches, ours.generations, stock.generations, strict=True):
        print(report.batch(tokenizer, *batch))
    scores = {outcome.label: outcome.perplexity for outcome in outcomes}
    print(report.perplexities(scores, work.text))
    if args.plans:
        print(report.plans(launcher.plans_built()))
    errors = report.errors(ours.perplexity, stock.perplexity)
    pairs = [*zip(ours.generations, stock.generations, strict=True)]
    for pair in pairs:
        errors += report.wrong_texts(*pair)
    for error in errors:
        print(f"mlx-marlin demo: {error}", file=sys.stderr)
    print(report.result(pairs, bool(errors)))
    return 1 if errors else 0


def check(args: argparse.Namespace) -> None:
    """Checks the arguments, and that kernels can run, before a model is loaded."""
    arguments.check_range("--tokens", args.tokens, 2, MAX_TOKENS)
    for count in args.batch:
        arguments.check_range("--batch", count, 1, MAX_PROMPTS)
    missing = selection.missing()
    if missing is not None:
        raise ValueError(missing)


def measure_all(model: nn.Module, work: Work, layout: str | None) -> list[Outcome]:
    """Runs the work with the float model, with stock MLX and with our kernels.

    A float model is quantized in place; a model that is already quantized has no float
    result. Stock MLX computes in float32 with the same weights, so that its result has
    no rounding to 16 bits; on a CPU this is 30 times as fast as float16.
    """
    from mlx_lm.utils import quantize_model

    from mlx_marlin import optimize

    outcomes = []
    if not any(isinstance(part, nn.QuantizedLinear) for part in model.modules()):
        outcomes.append(measure("float model", model, replace(work, batches=[])))
        quantize_model(model, {}, group_size=64, bits=4)
    parameters = model.parameters()
    model.set_dtype(mx.float32)
    bits = ", 4 bits" if outcomes else ""
    with _forced("stock"):  # a loaded model may have packed layers
        label = f"stock MLX{bits}, float32 activations"
        outcomes.append(measure(label, model, work))
    model.update(parameters)
    optimize(model, layout=layout, warm_up=sorted({*map(len, work.batches)}))
    outcomes.append(measure(f"mlx_marlin{bits}", model, work))
    return outcomes


@contextmanager
def _forced(backend: str) -> Iterator[None]:
    """Makes a back end serve all products in the block, whatever is faster."""
    before = os.environ.get(selection.ENVIRONMENT)
    os.environ[selection.ENVIRONMENT] = backend
    state.reset()
    try:
        yield
    finally:
        del os.environ[selection.ENVIRONMENT]
        if before is not None:
            os.environ[selection.ENVIRONMENT] = before
        state.reset()


def measure(label: str, model: nn.Module, work: Work) -> Outcome:
    """Generates text for each batch and computes the perplexity."""
    from mlx_marlin.cli.demo.generation import generate
    from mlx_marlin.lm.verification.perplexity import (
        passes,
        perplexity,
    )

    total = passes(work.text[:, 1:]) + sum(
        passes(prompts) + work.count - 1 for prompts in work.batches
    )
    with progress.bar(label, "pass", total) as bar:
        return Outcome(
            label=label,
            generations=[
                generate(model, prompts, work.count, bar.update)
                for prompts in work.batches
            ],
            perplexity=perplexity(model, work.text, bar.update),
        )


def checkpoint() -> Path:
    """Returns the folder of the demo's own model."""
    for folder in MODEL_FOLDERS:
        if (folder / "config.json").is_file():
            return folder
    places = " or ".join(map(str, MODEL_FOLDERS))
    raise ValueError(f"no model in {places}: select one with --model")


def prompt_tokens(tokenizer: Any, batch: int) -> mx.array:
    """Encodes the prompts, repeated as needed, to tokens `(batch, length)`.

    Shorter prompts are padded with leading line ends, which do not change Python code,
    so that no padding mask is needed.
    """
    start = tokenizer.encode("")
    line_end = tokenizer.encode("\n", add_special_tokens=False)[-1]
    bodies = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    length = max(map(len, bodies))
    rows = [
        [*start, *[line_end] * (length - len(body)), *body]
        for body in itertools.islice(itertools.cycle(bodies), batch)
    ]
    return mx.array(rows)


def held_out_tokens(
    tokenizer: Any, windows: int = WINDOWS, length: int = WINDOW
) -> mx.array:
    """Returns windows of the held-out text, evenly spaced, from the start of a line."""
    start = tokenizer.encode("")
    text = held_out_text()
    rows = []
    for i in range(windows):
        begin = text.index("\n", i * len(text) // windows) + 1
        piece = text[begin : begin + CHARACTERS * (length + 1)]
        tokens = tokenizer.encode(piece, add_special_tokens=False)
        rows.append([*start, *tokens[: length + 1]])
    return mx.array(rows)


def held_out_text() -> str:
    """Returns the source of the held-out modules of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join(
        (library / f"{name}.py").read_text(encoding="utf-8")
        for name in HELD_OUT_MODULES
    )
