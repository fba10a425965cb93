"""mlx-lm's greedy decoding of a model, timed."""

import time
from collections.abc import Iterator
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step

Prompts = list[list[int]]
Tokens = list[list[int]]
"""Of each step, the new token of each stream."""

PREPARED = 2
"""Steps before the clock starts: after the first one mlx-lm clears MLX's cache."""


def random_prompts(streams: int, length: int, vocabulary: int) -> Prompts:
    drawn = np.random.default_rng(0).integers(0, vocabulary, (streams, length))
    prompts: Prompts = drawn.tolist()
    return prompts


def steps(model: nn.Module, prompts: Prompts, new: int) -> Iterator[list[int]]:
    """Generates greedily, all streams at once.

    Yields:
        The new token of each stream, after one step of all of them.
    """
    # Never the last step: mlx-lm takes a finished stream's cache out there.
    most = new + 2
    if len(prompts) == 1:
        alone = generate_step(mx.array(prompts[0]), model, max_tokens=most)
        yield from ([token] for token, _ in alone)
        return
    streams = len(prompts)
    generator = BatchGenerator(
        model,
        max_tokens=most,
        completion_batch_size=streams,
        prefill_batch_size=streams,
    )
    try:
        generator.insert(prompts)
        while True:
            answers = sorted(generator.next_generated(), key=lambda each: each.uid)
            yield [each.token for each in answers]
    finally:
        generator.close()


def decode(model: nn.Module, prompts: Prompts, new: int) -> tuple[float, Tokens]:
    """Returns the tokens a second after the first `PREPARED`, and all tokens."""
    stepping = islice(steps(model, prompts, new), new)
    tokens = [*islice(stepping, PREPARED)]
    start = time.perf_counter()
    tokens += stepping
    seconds = time.perf_counter() - start
    if {len(step) for step in tokens} != {len(prompts)} or len(tokens) != new:
        raise RuntimeError(
            f"mlx-lm did not give {new} tokens of {len(prompts)} streams"
        )
    return len(prompts) * (new - PREPARED) / seconds, tokens
