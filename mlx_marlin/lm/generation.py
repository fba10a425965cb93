"""Tokens per second of a model, with our kernels and without, and the first token."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import planner, registry
from mlx_marlin.lm import decoding
from mlx_marlin.lm.decoding import PREPARED, Decoded, Prompts
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

ROUNDS = 3
"""Runs of each arm and number of streams, of which the medians are reported."""
WARM = PREPARED + 2
"""Tokens generated before the runs that count."""
METHOD = "wall time"
Load = Callable[[], nn.Module]
"""Loads a model; two models that it returns may have their arrays twice."""


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
        prompts = decoding.random_prompts(count, prompt, tokens)
        prompt_seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for model in arms.values():
            decoding.decode(model, prompts, WARM)
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
    """Predicts the rows of `measure` from the products of quantized layers alone.

    Attention, norms and the host are left out, so rates are upper bounds.
    """
    backend = registry.of_device(device)
    predictions: dict[str, Callable[[Problem], float]] = {
        STOCK_MODEL: lambda problem: backend.predict_stock(problem, device).seconds,
        OURS: lambda problem: (
            planner.predict(planner.choose(problem, device), device).seconds
        ),
    }

    def of_pass(predicted: Callable[[Problem], float], rows: int) -> Timing:
        seconds = sum(
            count * predicted(replace(problem, m=rows))
            for problem, count in counts.items()
        )
        return Timing(seconds=seconds, method="cost model")

    for count in streams:
        for arm, predicted in predictions.items():
            yield GenerationRow(
                model=name,
                arm=arm,
                streams=count,
                prompt_tokens=prompt,
                new_tokens=new,
                prompt=of_pass(predicted, count * prompt),
                step=of_pass(predicted, count),
            )


def first_tokens(
    name: str, load: Load, layout: str | None, prompt: int = PROMPT
) -> Iterator[FirstTokenRow]:
    """Times the first token of one stream, in a new process for each arm.

    The first prompt of a process compiles its kernels and runs the guard's checks that
    no earlier process has stored.
    """
    context: Any = multiprocessing.get_context("spawn")
    for arm in (STOCK_MODEL, OURS):
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
            cold, warm = executor.submit(
                cold_and_warm, load, arm == OURS, layout, prompt
            ).result()
        yield FirstTokenRow(
            model=name,
            arm=arm,
            prompt_tokens=prompt,
            cold=Timing(seconds=cold, method=METHOD),
            warm=Timing(seconds=warm, method=METHOD),
        )


def cold_and_warm(
    load: Load, is_ours: bool, layout: str | None, prompt: int
) -> tuple[float, float]:
    """Returns the seconds to the first token of this process, and of a later prompt."""
    model = load()
    mx.eval(model.parameters())
    if is_ours:
        optimize(model, layout=layout)
        mx.eval(model.parameters())
    prompts = decoding.random_prompts(1, prompt, vocabulary(model))
    decoded = [decoding.decode(model, prompts, WARM) for _ in range(2)]
    return decoded[0].prompt_seconds, decoded[1].prompt_seconds


def _sample(
    model: nn.Module, prompts: Prompts, new: int, prompt_seconds: list[float]
) -> timing.Sample:
    """Returns a sample of the seconds of a step, which also notes those of prompts."""

    def sample() -> float:
        decoded: Decoded = decoding.decode(model, prompts, new)
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
