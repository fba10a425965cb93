"""`mlx-marlin demo`: generates text and compares it with stock MLX."""

import argparse
import itertools
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin import progress, tables
from mlx_marlin.backends import graph, selection
from mlx_marlin.cli import arguments, models
from mlx_marlin.lm.verification.inputs import on_back_end, passes, perplexity, read
from mlx_marlin.tables import Table
from mlx_marlin.weights.dtypes import dtype_name

MODEL_FOLDERS = (
    Path(__file__).parent / "demo_model",
    Path(__file__).parents[2] / "examples" / "tiny_llama" / "model",
)
"""Where the demo's own model is: in the installed package or in the checkout."""

HELD_OUT_MODULES = (
    *("bisect", "calendar", "configparser", "fractions", "graphlib"),
    *("heapq", "queue", "sched", "shlex", "textwrap"),
)
"""Modules of the standard library that the demo's model was not trained on."""

WINDOWS, WINDOW = 4, 128
"""Windows of held-out text for the perplexity, and tokens predicted in each."""

CHARACTERS = 16
"""An upper bound of the average characters of a token in lines of code."""

LEAST_TOKENS, MAX_TOKENS = 3, 4096
"""Limits of --tokens: the first two steps are not timed."""
MAX_PROMPTS = 1024
"""Upper limit of --batch: every prompt has its own KV cache."""

TOLERANCE = 0.005
"""Maximum relative difference of our perplexity from that of stock MLX."""

CLOSE = 0.5
"""Lead of stock's first token over its second, in logits, above which rounding does not
change it. In bfloat16, rounding changes these logits by up to about 0.1."""

BACKENDS = {
    "metal": "Metal on this GPU",
    "cuda": "CUDA on this GPU",
    "emulator": "emulated on this CPU, whose times say nothing about an Apple GPU",
    "stock": "stock MLX, none of our kernels",
}

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
    """The work of every model of the demo."""

    batches: list[mx.array]  # Prompts of equal length: tokens `(batch, length)`
    count: int  # Tokens to generate for each prompt
    text: mx.array  # Held-out tokens `(windows, length + 1)`


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The output of a model for a batch of prompts."""

    tokens: list[list[int]]  # The generated tokens of each sequence
    # For each token, how far its logit leads the largest other one
    leads: list[list[float]]
    step_ms: float  # Milliseconds of a step, which adds a token to each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a model: a generation for each batch, and its perplexity."""

    label: str
    generations: list[Generation]
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
        help=f"tokens to generate for each prompt, {LEAST_TOKENS} to {MAX_TOKENS}; "
        "default: 32",
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
    # On a GPU ours serve all products, whatever is faster.
    with on_back_end(backend) if backend in selection.ON_GPU else nullcontext():
        return _demo(args)


def _demo(args: argparse.Namespace) -> int:
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
    print(_opening(name, model, args.layout))
    outcomes = measure_all(model, work, args.layout)
    stock, ours = outcomes[-2:]
    errors = wrong_results(ours.perplexity, stock.perplexity)
    equal = 0
    for batch in zip(work.batches, ours.generations, stock.generations, strict=True):
        print(_texts(tokenizer, *batch))
        errors += wrong_texts(*batch[1:])
        equal += len(batch[0]) - len(_parts(*batch[1:]))
    print(f"\n{tables.printed(_perplexities(outcomes, work.text))}")
    if args.plans:
        print(f"\n{tables.printed(_plans())}")
    for error in errors:
        print(f"mlx-marlin demo: {error}", file=sys.stderr)
    print(
        f"\nresult: {'FAILED' if errors else 'passed'}: {equal} of {sum(args.batch)} "
        f"texts equal stock MLX's, {len(graph.plans_built())} plans (--plans lists "
        f"them)"
    )
    return 1 if errors else 0


def check(args: argparse.Namespace) -> None:
    """Checks the arguments, and that kernels can run, before a model is loaded."""
    arguments.check_range("--tokens", args.tokens, LEAST_TOKENS, MAX_TOKENS)
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
    with on_back_end("stock"):  # a loaded model may have packed layers
        label = f"stock MLX{bits}, float32 activations"
        outcomes.append(measure(label, model, work))
    model.update(parameters)
    optimize(model, layout=layout, warm_up=sorted({*map(len, work.batches)}))
    outcomes.append(measure(f"mlx_marlin{bits}", model, work))
    return outcomes


def measure(label: str, model: nn.Module, work: Work) -> Outcome:
    """Generates text for each batch and computes the perplexity."""
    total = passes(work.text[:, 1:]) + len(work.batches)
    with progress.bar(label, "part", total) as bar:
        generations = []
        for prompts in work.batches:
            generations.append(generate(model, prompts, work.count))
            bar.update()
        score = perplexity(model, work.text, bar.update)
    return Outcome(label=label, generations=generations, perplexity=score)


def generate(model: nn.Module, prompts: mx.array, count: int) -> Generation:
    """Generates greedily for all prompts at once; reads the text again for the leads.

    `prompts`: tokens `(batch, length)`.
    """
    from mlx_lm.models.cache import make_prompt_cache  # it takes seconds

    from mlx_marlin.lm import generation

    rows: Any = prompts.tolist()
    decoded = generation.decode(model, rows, count)
    tokens = mx.array(decoded.tokens).T
    text = mx.concatenate([prompts, tokens[:, :-1]], axis=1)
    chunks = read(model, text, make_prompt_cache(model), lambda: None)
    best = [mx.topk(logits.astype(mx.float32), 2, axis=-1) for logits in chunks]
    pairs = mx.concatenate(best, axis=1)[:, -count:]
    leads: Any = mx.abs(pairs[..., 1] - pairs[..., 0]).tolist()
    written: Any = tokens.tolist()
    return Generation(tokens=written, leads=leads, step_ms=decoded.step_seconds * 1e3)


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


def _opening(name: str, model: nn.Module, layout: str | None) -> str:
    """Returns a description of the model, its layout and the back end."""
    leaves = dict(tree_flatten(model.parameters())).values()
    weights = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
    dtypes = sorted({dtype_name(weight.dtype) for weight in weights})
    size = sum(weight.nbytes for weight in weights)
    return (
        f"model     {name}: {size / 1e6:.1f} MB, {', '.join(dtypes)}\n"
        f"layout    {layout or 'the one for this back end'}\n"
        f"back end  {BACKENDS[selection.backend()]}"
    )


def _texts(
    tokenizer: Any, prompts: mx.array, ours: Generation, stock: Generation
) -> str:
    """Returns the texts of a batch, their comparison with stock MLX, and the time."""
    count, parts = len(ours.tokens), _parts(ours, stock)
    ends, rows = tokenizer.eos_token_ids, cast(list[list[int]], prompts.tolist())
    texts = []
    for prompt, tokens in zip(rows, ours.tokens, strict=True):
        begin = tokenizer.decode(prompt, skip_special_tokens=True).lstrip("\n")
        written = itertools.takewhile(lambda token: token not in ends, tokens)
        texts.append(f"{begin}«{tokenizer.decode([*written])}»")
    return "\n".join(
        [
            f"\n=== {count} at once: prompt «generated» ===",
            "\n---\n".join(texts),
            "===",
            f"tokens: {count - len(parts)} of {count} texts equal stock MLX's",
            *(f"  {text}" for text, _ in parts),
            f"time: {ours.step_ms / count:.1f} ms a token, {ours.step_ms:.1f} ms a "
            f"step, {BACKENDS[selection.backend()]}",
        ]
    )


def _parts(ours: Generation, stock: Generation) -> list[tuple[str, float]]:
    """Returns where texts differ first, and how sure stock MLX was of its token."""
    found = []
    for i, texts in enumerate(zip(ours.tokens, stock.tokens, strict=True)):
        for j, (token, expected) in enumerate(zip(*texts, strict=True)):
            if token != expected:
                lead = stock.leads[i][j]
                text = f"text {i + 1} parts at token {j + 1}, where stock's first "
                text += f"choice led its second by {lead:.3g} in the logits"
                found.append((text, lead))
                break
    return found


def _perplexities(outcomes: Iterable[Outcome], text: mx.array) -> Table:
    windows, length = text.shape
    return Table(
        title=f"perplexity on held-out text, {windows} windows of {length - 1} tokens",
        rows=[
            {"model": each.label, "perplexity": each.perplexity} for each in outcomes
        ],
    )


def _plans() -> Table:
    """Returns the plans that ran, by their sizes."""
    sizes = attrgetter("problem.m", "problem.k", "problem.n")
    plans = sorted(graph.plans_built(), key=sizes)
    cells = ((sizes(plan), plan.explain()) for plan in plans)
    rows = [{"rows": m, "k→n": f"{k}→{n}", "plan": text} for (m, k, n), text in cells]
    return Table(title=f"plans used: {len(rows)}", rows=rows, once=["rows"])


def wrong_results(ours: float, stock: float) -> list[str]:
    """Returns errors: a wrong perplexity, or kernels that did not run."""
    found = []
    # Written so that NaN is an error.
    if not abs(ours - stock) <= TOLERANCE * stock:
        found.append(
            f"our perplexity {ours:.4f} is not within {TOLERANCE:.1%} of stock's "
            f"{stock:.4f}"
        )
    # Stock MLX serves a model in float32 if the back end has no kernels for it.
    lacks_float32 = "float32" not in selection.traits().dtypes
    none_ran = lacks_float32 and not graph.plans_built()
    is_stock = selection.backend() == "stock" and selection.forced_backend() != "stock"
    if is_stock or none_ran:
        found.append("none of our kernels ran: stock MLX served every product")
    return found


def wrong_texts(ours: Generation, stock: Generation) -> list[str]:
    """Returns errors: differences from stock MLX that rounding does not explain."""
    return [
        f"{len(ours.tokens)} at once, {text}, more than {CLOSE}"
        for text, lead in _parts(ours, stock)
        if not lead <= CLOSE  # so that NaN is an error
    ]
