"""Tokens a second with and without drafts, on this machine's GPU, 8B shape.

The model has random weights; a logits processor makes it write a given text, at the
cost of a real one: one text repeats a passage of 200 tokens, the other repeats nothing.

Later texts find what the first one made (cuDNN plans each length of a cache). So with
`--first` each way writes the first text of a process, which repeats, and no other.

Usage: python benchmarks/cuda_drafts.py [--first] [--model NAME] [--smoke]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from cuda_models import asked_sizes, quantized_model
from cuda_weights import Format
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin.lm.drafts.decoder import Decoder, Picker, Token
from mlx_marlin.lm.drafts.drafters import LookupDrafter
from mlx_marlin.lm.drafts.pass_cost import cost_of
from mlx_marlin.lm.drafts.passes import Passes

PASSAGE, NEW, REPEATS = 200, 400, 5


def writing(text: Sequence[int]) -> Callable[[mx.array, mx.array], mx.array]:
    """Returns a logits processor that makes a model write a text."""
    whole = mx.array(text)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, whole[tokens.size]].add(1e4)

    return processor


def plain(model: Any, text: list[int], begun: int) -> float:
    """Returns the tokens a second of mlx-lm's plain decoding."""
    steps = generate_step(
        mx.array(text[:begun]),
        model,
        max_tokens=NEW,
        logits_processors=[writing(text)],
    )
    return rate(int(token) for token, _ in steps)


def looked_up(model: Any, text: list[int], begun: int) -> tuple[float, Decoder]:
    """Returns the tokens a second with drafts, and the decoder."""
    picker = Picker(sampler=None, processors=[writing(text)])
    passes = Passes(model, make_prompt_cache(model))
    decoder = Decoder(
        passes, [LookupDrafter()], cost_of(model), picker, generation_stream
    )
    found: list[Token] = []

    def tokens() -> Any:
        for each in decoder.tokens(text[:begun], NEW):
            found.append(each)
            yield each.token

    result = rate(tokens())
    assert [each.token for each in found] == text[begun : begun + NEW]
    return result, decoder


def rate(tokens: Any) -> float:
    """Returns the tokens a second after the first."""
    next(tokens)
    started = time.perf_counter()
    count = sum(1 for _ in tokens)
    return count / (time.perf_counter() - started)


def first_texts(arguments: Sequence[str]) -> None:
    """Lets processes write one text each, the same without drafts and with them."""
    for way in ("plain", "lookup"):
        command = [sys.executable, __file__, "--only", way, *arguments]
        subprocess.run(command, check=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--only", choices=("plain", "lookup"))
    asked, sys.argv[1:] = parser.parse_known_args()
    if asked.first:
        first_texts(sys.argv[1:])
        return
    sizes = asked_sizes(__doc__)
    model = quantized_model(sizes, Format(mode="affine", bits=4, group_size=64))
    mx.eval(model.parameters())
    mlx_marlin.optimize(model)
    cost = cost_of(model)
    print(mx.device_info().get("device_name"), f"cost of a pass: {cost.source}")
    print({m: round(cost.seconds(m) * 1e3, 2) for m in (1, 2, 4, 8, 16)}, "ms")
    high = sizes["vocab_size"]
    count = PASSAGE + NEW + 1
    drawn: Any = mx.random.permutation(high, key=mx.random.key(0)).tolist()
    new = drawn[:count] if high > count else (drawn * count)[:count]
    passage = drawn[:PASSAGE]
    texts = {"repeats": passage * (count // PASSAGE + 1), "does not": new}
    if asked.only:
        text = texts["repeats"]
        if asked.only == "plain":
            speed = plain(model, text, PASSAGE)
        else:
            speed, _ = looked_up(model, text, PASSAGE)
        print(f"first text of a process, {asked.only}: {speed:.1f} tokens/s")
        return
    for name, text in texts.items():
        own, with_drafts = [], []
        for _ in range(REPEATS):
            own.append(plain(model, text, PASSAGE))
            speed, decoder = looked_up(model, text, PASSAGE)
            with_drafts.append(speed)
        before, after = statistics.median(own), statistics.median(with_drafts)
        print(
            f"text that {name}: plain {before:.1f} tokens/s, lookup {after:.1f} "
            f"({after / before:.2f} times), {decoder.accepted} of {decoder.drafted} "
            f"drafted tokens accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
