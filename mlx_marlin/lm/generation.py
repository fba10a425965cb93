"""mlx-lm's greedy decoding of a model, timed with our kernels and without."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

from mlx_marlin.backends import planner
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.measure import timing
from mlx_marlin.measure.rows import (
    NEW,
    OURS,
    PROMPT,
    STOCK_MODEL,
    FirstTokenRow,
    GenerationRow,
    Timing,
)
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem

Prompts = list[list[int]]
Tokens = list[list[int]]
"""Of each step, the new token of each stream."""

PREPARED = 2
"""Steps before the clock starts: after the first one mlx-lm clears MLX's cache."""
ROUNDS = 3
"""Runs of each arm and number of streams, of which the medians are reported."""
WARM = PREPARED + 2
"""Tokens generated before the runs that count."""
METHOD = "wall time"
Result = TypeVar("Result")
Load = Callable[[], nn.Module]
"""Loads a model; two models that it returns may have their arrays twice."""


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


def models(load: Load, layout: str | None) -> dict[str, nn.Module]:
    """Returns the model as stock MLX runs it and with our kernels, by arm.

    Both share the arrays that `optimize` does not change.
    """
    stock, ours = load(), load()
    ours.update(stock.parameters())
    mx.eval(stock.parameters())
    optimize(ours, layout=layout)
    mx.eval(ours.parameters())
    return {STOCK_MODEL: stock, OURS: ours}


def vocabulary(model: nn.Module) -> int:
    """Returns the number of tokens that a model's embedding has."""
    for _, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
            return int(layer.weight.shape[0])
    raise ValueError("the model has no embedding: no prompts can be drawn for it")


def measure(
    name: str,
    arms: Mapping[str, nn.Module],
    streams: Sequence[int],
    prompt: int = PROMPT,
    new: int = NEW,
) -> Iterator[GenerationRow]:
    """Times greedy generation; arms take turns."""
    tokens = vocabulary(next(iter(arms.values())))
    for count in streams:
        prompts = random_prompts(count, prompt, tokens)
        prompt_seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for model in arms.values():
            decode(model, prompts, WARM)
        samples = {
            arm: _sample(model, prompts, new, prompt_seconds[arm])
            for arm, model in arms.items()
        }
        for arm, steps in timing.interleaved(samples, seconds=0, least=ROUNDS).items():
            yield GenerationRow(
                model=name,
                arm=arm,
                streams=count,
                prompt_tokens=prompt,
                new_tokens=new,
                prompt=_measured(timing.Spread.of(prompt_seconds[arm])),
                step=_measured(steps),
            )


def predict(
    name: str,
    counts: Counter[Problem],
    device: PlanningDevice,
    streams: Sequence[int],
    prompt: int = PROMPT,
    new: int = NEW,
) -> Iterator[GenerationRow]:
    """Predicts our rows of `measure` from the products of quantized layers alone.

    Attention, norms and the host are left out, so rates are upper bounds.
    """

    def of_pass(rows: int) -> Timing:
        seconds = 0.0
        for problem, count in counts.items():
            plan = planner.choose(replace(problem, m=rows), device)
            seconds += count * planner.predict(plan, device).seconds
        return Timing(seconds=seconds, method="cost model")

    for count in streams:
        yield GenerationRow(
            model=name,
            arm=OURS,
            streams=count,
            prompt_tokens=prompt,
            new_tokens=new,
            prompt=of_pass(count * prompt),
            step=of_pass(count),
        )


def first_tokens(
    name: str, load: Load, layout: str | None, prompt: int = PROMPT
) -> Iterator[FirstTokenRow]:
    """Times the first token of one stream, in a new process for each arm.

    The first prompt of a process compiles its kernels and runs the guard's checks that
    no earlier process has stored.
    """
    for arm in (STOCK_MODEL, OURS):
        is_ours = arm == OURS
        cold, warm = in_new_process(cold_and_warm, load, is_ours, layout, prompt)
        yield FirstTokenRow(
            model=name,
            arm=arm,
            prompt_tokens=prompt,
            cold=Timing(seconds=cold, method=METHOD),
            warm=Timing(seconds=warm, method=METHOD),
        )


def in_new_process(function: Callable[..., Result], *args: Any) -> Result:
    """Returns what a function returns in a process of its own."""
    context: Any = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(function, *args).result()


def cold_and_warm(
    load: Load, is_ours: bool, layout: str | None, prompt: int
) -> tuple[float, float]:
    """Returns the seconds to the first token of this process, and of a later prompt."""
    model = load()
    mx.eval(model.parameters())
    if is_ours:
        optimize(model, layout=layout)
        mx.eval(model.parameters())
    prompts = random_prompts(1, prompt, vocabulary(model))
    decoded = [decode(model, prompts, WARM) for _ in range(2)]
    return decoded[0].prompt_seconds, decoded[1].prompt_seconds


def _sample(
    model: nn.Module, prompts: Prompts, new: int, prompt_seconds: list[float]
) -> timing.Sample:
    """Returns a sample of the seconds of a step, which also notes those of prompts."""

    def sample() -> float:
        decoded: Decoded = decode(model, prompts, new)
        prompt_seconds.append(decoded.prompt_seconds)
        return decoded.step_seconds

    return sample


def _measured(spread: timing.Spread) -> Timing:
    return Timing(
        seconds=spread.median,
        method=METHOD,
        range=spread.range,
        samples=spread.samples,
        drift=spread.drift,
    )
