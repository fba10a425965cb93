"""Tries values of `MLX_MAX_OPS_PER_BUFFER`, each in processes of its own.

MLX reads the variable once, when it starts.
"""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_marlin.lm import decoding, generation
from mlx_marlin.lm.decoding import Tokens
from mlx_marlin.lm.model_tuning.comparison import Comparison, chosen
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.tuned_models.environment import VARIABLE
from mlx_marlin.lm.tuned_models.settings import ModelSettings

VALUES = (100, 200, 400)
"""Operations of a command buffer that are tried; MLX's own are 20 to 50."""
ROUNDS = 3
"""Runs for each number of streams in a process."""

Value = int | None
"""A value of the variable; None for MLX's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process measures."""

    load: generation.Load  # Loads the model; must be importable
    settings: ModelSettings | None  # The settings; None for stock MLX
    streams: Sequence[int]  # Numbers of prompts at a time
    prompt: int  # Tokens of a prompt
    new: int  # Tokens to generate for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one process has measured."""

    value: str | None  # The variable that the process has seen
    steps: dict[int, float]  # Number of streams -> median seconds of a step
    prompts: dict[int, float]  # Likewise, of reading the prompts
    tokens: list[Tokens]  # The tokens of all streams


Measure = Callable[[Job, Value], Run]


def measure(job: Job, value: Value) -> Run:
    """Measures with a value of the variable, in a new process."""
    context: Any = multiprocessing.get_context("spawn")
    with (
        _environment(value),
        ProcessPoolExecutor(max_workers=1, mp_context=context) as executor,
    ):
        try:
            return executor.submit(run, job).result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"a process with {VARIABLE}={value} ended") from error


def run(job: Job) -> Run:
    """Measures in this process."""
    model = job.load()
    mx.eval(model.parameters())
    if job.settings is not None:
        optimize(model, **job.settings.options)
        mx.eval(model.parameters())
    vocabulary = generation.vocabulary(model)
    steps, prompts, tokens = {}, {}, []
    for count in job.streams:
        given = decoding.random_prompts(count, job.prompt, vocabulary)
        tokens.append(decoding.decode(model, given, job.new).tokens)  # does not count
        found = [decoding.decode(model, given, job.new) for _ in range(ROUNDS)]
        steps[count] = statistics.median(each.step_seconds for each in found)
        prompts[count] = statistics.median(each.prompt_seconds for each in found)
    return Run(
        value=os.environ.get(VARIABLE), steps=steps, prompts=prompts, tokens=tokens
    )


@dataclass(kw_only=True)
class Values:
    """Compares values of the variable with MLX's own.

    Each value is measured twice, in a mirrored order (A B C, C B A), so that a machine
    that slows down affects all alike.
    """

    job: Job  # What to measure
    measure: Measure  # Measures a value
    # Whether there is no more time; then no value is chosen
    is_over: Callable[[], bool] = lambda: False
    values: Sequence[int] = VALUES  # The values to try

    def __post_init__(self) -> None:
        self.comparisons: dict[int, Comparison] = {}
        self.failure: str | None = None

    @property
    def best(self) -> Value:
        """The value that is faster than MLX's own; None if no value is."""
        winner = chosen([*self.comparisons.values()])
        if winner is None or not winner.is_faster:
            return None
        return next(v for v, each in self.comparisons.items() if each is winner)

    def run(self) -> Iterator[Value]:
        """Yields each value after it was measured; then `best` is known."""
        order = [None, *self.values]
        found: dict[Value, list[Run]] = {value: [] for value in order}
        failed: dict[Value, str] = {}
        for value in (*order, *reversed(order)):
            if self.is_over():
                return  # half of the pairs would not be in turns
            if value in failed:
                continue
            try:
                found[value].append(self.measure(self.job, value))
            except (RuntimeError, ValueError, OSError) as error:
                failed[value] = str(error)
            yield value
        self._compare(found, failed)

    def _compare(self, found: dict[Value, list[Run]], failed: dict[Value, str]) -> None:
        if None in failed:
            self.failure = failed[None]
            return
        for value in self.values:
            reason = failed.get(value) or _other_tokens(found[None], found[value])
            self.comparisons[value] = (
                Comparison(settings=self.job.settings, excluded=reason)
                if reason
                else _comparison(self.job, found[None], found[value])
            )


def _comparison(job: Job, own: list[Run], others: list[Run]) -> Comparison:
    """Returns the comparison of the mean times of each number of streams."""
    return Comparison(
        settings=job.settings,
        speedups={
            count: sum(run.steps[count] for run in own)
            / sum(run.steps[count] for run in others)
            for count in job.streams
        },
        prompts={
            count: sum(run.prompts[count] for run in own)
            / sum(run.prompts[count] for run in others)
            for count in job.streams
        },
    )


def _other_tokens(own: list[Run], others: list[Run]) -> str | None:
    tokens = [run.tokens for run in (*own, *others)]
    same = all(each == tokens[0] for each in tokens)
    return None if same else "the tokens differ from those with MLX's own value"


@contextmanager
def _environment(value: Value) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    _set(None if value is None else str(value))
    try:
        yield
    finally:
        _set(before)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = value
