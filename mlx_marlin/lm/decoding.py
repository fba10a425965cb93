"""mlx-lm's greedy decoding of a model, timed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

Prompts = list[list[int]]
Tokens = list[list[int]]
"""Of each step, the new token of each stream."""

PREPARED = 2
"""Steps before the clock starts: after the first one mlx-lm clears MLX's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Generated tokens and their times."""

    tokens: Tokens  # Of each step, the new token of each stream
    prompt_seconds: float  # Seconds until the first step is done
    step_seconds: float  # Mean seconds of a step after the first `PREPARED`

    @property
    def rate(self) -> float:
        """Generated tokens per second of all streams together."""
        return len(self.tokens[0]) / self.step_seconds


def random_prompts(streams: int, length: int, vocabulary: int) -> Prompts:
    """Returns prompts of random tokens, which are the same in each call."""
    drawn = mx.random.randint(0, vocabulary, (streams, length), key=mx.random.key(0))
    prompts: Prompts = drawn.tolist()  # type: ignore[assignment]
    return prompts


def steps(model: nn.Module, prompts: Prompts, new: int) -> Iterator[list[int]]:
    """Generates greedily, all streams at once."""
    # Never the last step: mlx-lm takes a finished stream's cache out there.
    most = new + 2
    if len(prompts) == 1:
        alone = generate_step(mx.array(prompts[0]), model, max_tokens=most)
        yield from ([int(token)] for token, _ in alone)
        return
    streams = len(prompts)
    generator: Any = BatchGenerator(  # its methods are not annotated
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


def decode(model: nn.Module, prompts: Prompts, new: int) -> Decoded:
    """Generates greedily and times the prompt and the steps."""
    stepping = islice(steps(model, prompts, new), new)
    begun = time.perf_counter()
    tokens = [*islice(stepping, 1)]
    first = time.perf_counter()
    tokens += islice(stepping, PREPARED - 1)
    start = time.perf_counter()
    tokens += stepping
    end = time.perf_counter()
    if {len(step) for step in tokens} != {len(prompts)} or len(tokens) != new:
        raise RuntimeError(
            f"mlx-lm did not give {new} tokens of {len(prompts)} streams"
        )
    return Decoded(
        tokens=tokens,
        prompt_seconds=first - begun,
        step_seconds=(end - start) / (new - PREPARED),
    )
