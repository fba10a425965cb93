"""The output of `mlx-marlin demo`: texts, comparisons, plans and errors."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.backends import launcher, selection
from mlx_marlin.cli.demo.generation import Generation, compare_tokens
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.dtypes import dtype_name

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


def opening(name: str, model: nn.Module, layout: str | None) -> str:
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


def batch(
    tokenizer: Any, prompts: mx.array, ours: Generation, stock: Generation
) -> str:
    """Returns the texts of a batch, their comparison with stock MLX, and the time."""
    count = len(ours.tokens)
    texts = [
        f"{_prompt(tokenizer, prompts[i])}«{_written(tokenizer, ours.tokens[i])}»"
        for i in range(count)
    ]
    return "\n".join(
        [
            f"\n=== {count} at once: prompt «generated» ===",
            "\n---\n".join(texts),
            "===",
            *comparison(ours, stock),
            f"time: {ours.step_ms / count:.1f} ms a token, {ours.step_ms:.1f} ms a "
            f"step, {BACKENDS[selection.backend()]}",
        ]
    )


def comparison(ours: Generation, stock: Generation) -> list[str]:
    """Returns lines on how many texts equal stock's, and where the others differ."""
    parts = _parts(ours, stock)
    count = len(ours.tokens)
    equal = f"tokens: {count - len(parts)} of {count} texts equal stock MLX's"
    return [equal, *(f"  {text}" for text, _ in parts)]


def _parts(ours: Generation, stock: Generation) -> list[tuple[str, float]]:
    """Returns where texts differ first, and how sure stock MLX was of its token."""
    return [
        (
            f"text {i + 1} parts at token {part + 1}, where stock's first choice led "
            f"its second by {stock.margins[i][part]:.3g} in the logits",
            stock.margins[i][part],
        )
        for i, part in enumerate(compare_tokens(ours.tokens, stock.tokens))
        if part is not None
    ]


def perplexities(scores: Mapping[str, float], text: mx.array) -> str:
    """Returns a table of perplexities on held-out tokens `(windows, length + 1)`."""
    windows, length = text.shape
    lines = [f"\nperplexity on held-out text, {windows} windows of {length - 1} tokens"]
    lines += [f"  {score:8.4f}  {label}" for label, score in scores.items()]
    return "\n".join(lines)


def plans(used: Iterable[Plan]) -> str:
    """Returns a list of the plans that ran, grouped by rows."""
    known = sorted(
        used, key=lambda plan: (plan.problem.m, plan.problem.n, plan.problem.k)
    )
    lines = [f"\nplans used: {len(known)}"]
    for m, group in itertools.groupby(known, key=lambda plan: plan.problem.m):
        lines.append(f"  {m} row{'s' * (m > 1)}")
        lines += [f"    {p.problem.k}→{p.problem.n}: {p.explain()}" for p in group]
    return "\n".join(lines)


def result(pairs: Sequence[tuple[Generation, Generation]], is_wrong: bool) -> str:
    """Returns the last line: what agrees, the number of plans, and the verdict."""
    count = sum(len(ours.tokens) for ours, _ in pairs)
    equal = count - sum(len(_parts(*pair)) for pair in pairs)
    return (
        f"\nresult: {'FAILED' if is_wrong else 'passed'}: {equal} of {count} texts "
        f"equal stock MLX's, {len(launcher.plans_built())} plans (--plans lists them)"
    )


def errors(ours: float, stock: float) -> list[str]:
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
    none_ran = lacks_float32 and not launcher.plans_built()
    is_stock = selection.backend() == "stock" and selection.forced_backend() != "stock"
    if is_stock or none_ran:
        found.append("none of our kernels ran: stock MLX served every product")
    return found


def wrong_texts(ours: Generation, stock: Generation) -> list[str]:
    """Returns errors: differences from stock MLX that rounding does not explain."""
    return [
        f"{len(ours.tokens)} at once, {text}, more than {CLOSE}"
        for text, margin in _parts(ours, stock)
        if not margin <= CLOSE  # so that NaN is an error
    ]


def _prompt(tokenizer: Any, prompt: mx.array) -> str:
    """Decodes a prompt without its padding of line ends."""
    text: str = tokenizer.decode(prompt.tolist(), skip_special_tokens=True)
    return text.lstrip("\n")


def _written(tokenizer: Any, tokens: list[int]) -> str:
    """Decodes generated tokens up to the end-of-text token."""
    ends = tokenizer.eos_token_ids
    text: str = tokenizer.decode(
        list(itertools.takewhile(lambda token: token not in ends, tokens))
    )
    return text
