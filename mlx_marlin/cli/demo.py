"""`mlx-marlin demo`: a trained model generates text through the Metal kernels."""

import argparse
import itertools
import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import state
from mlx_marlin.backends import launch, selection
from mlx_marlin.cli import models
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS

if TYPE_CHECKING:
    from mlx_marlin.cli.generation import Generation

CHECKPOINT = Path("examples/tiny_llama/model")
"""The demo's own model, relative to the repository."""

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
"""Windows of held-out text for the perplexity, and the tokens predicted in each."""

CHARACTERS = 16
"""More characters than a token of any tokenizer has, on average over lines of code."""

MOST_TOKENS = 4096
"""Tokens to generate for each prompt."""
MOST_PROMPTS = 1024
"""Prompts at once: each has a cache of keys and values of its own."""

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
    """What every model of the demo is asked to do.

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
    """What a model did: a generation for each batch, and its perplexity."""

    label: str
    generations: "list[Generation]"
    perplexity: float


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "demo",
        description="Generate text with a 4-bit model through the Metal kernels, and "
        "compare it with stock MLX.",
    )
    parser.add_argument(
        "--model", help="any mlx-lm model, a folder or a name; default: the demo's own"
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="default: as `optimize` chooses it"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=32,
        help=f"tokens to generate for each prompt, 2 to {MOST_TOKENS}; default: 32",
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 4, 8],
        help=f"prompts at once, 1 to {MOST_PROMPTS}; default: 1 4 8",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPE_BYTES), help="activations; default: the model's"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 1 if our answer is off or our kernels did not run."""
    check(args)
    _insist()

    from mlx_marlin.cli import demo_report

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
    print(demo_report.opening(name, model, args.layout))
    outcomes = measure_all(model, work, args.layout)
    stock, ours = outcomes[-2:]
    for batch in zip(work.batches, ours.generations, stock.generations, strict=True):
        print(demo_report.batch(tokenizer, *batch))
    scores = {outcome.label: outcome.perplexity for outcome in outcomes}
    print(demo_report.perplexities(scores, work.text))
    print(demo_report.plans(launch.plans_built()))
    complaints = demo_report.complaints(ours.perplexity, stock.perplexity)
    for pair in zip(ours.generations, stock.generations, strict=True):
        complaints += demo_report.wrong_texts(*pair)
    for complaint in complaints:
        print(f"mlx-marlin demo: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def check(args: argparse.Namespace) -> None:
    """Checks the arguments, and that kernels can run, before a model is loaded.

    Raises:
        ValueError: If an argument is out of its limits, or no kernel can run.
    """
    if not 2 <= args.tokens <= MOST_TOKENS:
        raise ValueError(f"--tokens {args.tokens}, expected 2 to {MOST_TOKENS}")
    for count in args.batch:
        if not 1 <= count <= MOST_PROMPTS:
            raise ValueError(f"--batch {count}, expected 1 to {MOST_PROMPTS}")
    lacking = selection.missing()
    if lacking is not None:
        raise ValueError(lacking)


def _insist() -> None:
    """Makes every product ours on a GPU too, where stock MLX would be as fast."""
    if selection.backend() in selection.ON_GPU:
        os.environ[selection.ENVIRONMENT] = selection.backend()
        state.reset()


def measure_all(model: nn.Module, work: Work, layout: str | None) -> list[Outcome]:
    """Runs the work on the float model, if it is one, on stock MLX and on ours.

    The model is quantized and converted in place on the way. Stock MLX computes in
    float32, with the very same weights: the answer then has no rounding of stock's in
    it, and on a CPU stock is thirty times as fast as in float16.
    """
    from mlx_lm.utils import quantize_model

    from mlx_marlin import optimize

    outcomes = []
    if not any(isinstance(part, nn.QuantizedLinear) for part in model.modules()):
        outcomes.append(measure("float model", model, replace(work, batches=[])))
        quantize_model(model, {}, group_size=64, bits=4)
    parameters = model.parameters()
    model.set_dtype(mx.float32)
    outcomes.append(measure("stock MLX, 4 bits, float32 activations", model, work))
    model.update(parameters)
    optimize(model, layout=layout)
    outcomes.append(measure("mlx_marlin, 4 bits", model, work))
    return outcomes


def measure(label: str, model: nn.Module, work: Work) -> Outcome:
    """Generates for each batch and reads the text, with a progress bar."""
    from tqdm import tqdm

    from mlx_marlin.cli.generation import generate, passes, perplexity

    total = passes(work.text[:, 1:]) + sum(
        passes(prompts) + work.count - 1 for prompts in work.batches
    )
    with tqdm(total=total, desc=label, unit="pass") as bar:
        return Outcome(
            label=label,
            generations=[
                generate(model, prompts, work.count, bar.update)
                for prompts in work.batches
            ],
            perplexity=perplexity(model, work.text, bar.update),
        )


def checkpoint() -> Path:
    """Finds the demo's own model: beside this package, else in the working folder."""
    repository = Path(__file__).parents[2]
    for root in (repository, Path.cwd()):
        if (root / CHECKPOINT / "config.json").is_file():
            return root / CHECKPOINT
    raise ValueError(
        f"no {CHECKPOINT} in {repository} or {Path.cwd()}: name a model with --model"
    )


def prompt_tokens(tokenizer: Any, batch: int) -> mx.array:
    """Encodes the prompts, repeated as needed, to tokens `(batch, length)`.

    Line ends stand before the shorter ones: Python does not mind them, and no model
    needs a padding mask.
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
    """Cuts windows from the held-out text, at equal distances and whole lines.

    Returns:
        Tokens of shape `(windows, length + 1)`; a tokenizer's start token comes on top.
    """
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
    """Reads the held-out modules of the running Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join(
        (library / f"{name}.py").read_text(encoding="utf-8")
        for name in HELD_OUT_MODULES
    )
