"""Times a model's forward passes with settings and with stock MLX, in turns."""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.lm import generation
from mlx_marlin.lm.measured_models import VARIABLE
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.race import forward_race
from mlx_marlin.lm.race.forward_race import Budget, Samples
from mlx_marlin.lm.race.settings import DEFAULTS, Comparison, ModelSettings, chosen
from mlx_marlin.planning.measurement import PROMPTS

ROUNDS, PASSES = 4, 3
"""Turns of each arm, each of which comes first in half of them, and passes of a turn
that count."""
MEMORY_SHARE = 0.8
"""Share of the GPU's memory that two copies of the weights may take."""
ULPS = 8
"""How many units in the last place of the largest logit two logits of a tie differ by
at most: logits are sums that each kernel rounds in its own way."""
LEAST_PRECISION = 2.0**-16
"""Smallest unit: in float32, the order of a sum changes more than its last bit."""
VALUES = (100, 200, 400)
"""Operations of a command buffer that are tried; MLX's own are 20 to 50."""

Value = int | None
"""A value of the variable; None for MLX's own."""


@dataclass(kw_only=True)
class Arms:
    """A model as stock MLX runs it, and as `optimize` converts it."""

    load: generation.Load  # Loads the model
    rows: Sequence[int]  # Rows of the passes; one of a prompt is timed too

    def __post_init__(self) -> None:
        self.stock = self.load()
        mx.eval(self.stock.parameters())

    def compare(self, settings: ModelSettings) -> Comparison:
        """Returns how settings compare with stock MLX.

        Settings that fail, or whose logits contradict stock MLX's, are excluded.
        """
        try:
            model = self._converted(settings)
            if reason := contradiction(self.stock, model, _timed(self.rows)):
                return Comparison(settings=settings, excluded=reason)
            turns: tuple[list[Samples], list[Samples]] = [], []
            for turn in range(ROUNDS):
                for arm in (0, 1) if turn % 2 == 0 else (1, 0):
                    turns[arm].append(_sample((self.stock, model)[arm], self.rows))
        except Exception as error:  # a kernel's or mlx-lm's: others may work
            reason = f"{type(error).__name__}: {error}"
            return Comparison(settings=settings, excluded=reason)
        return Comparison(settings=settings, seconds=forward_race.medians(*turns))

    def layouts(self) -> tuple[str, ...]:
        """Returns the layouts whose weights fit the GPU's memory beside stock MLX's."""
        arrays = cast("Any", tree_flatten(self.stock.parameters()))
        size = sum(array.nbytes for _, array in arrays)
        memory = int(mx.device_info().get("memory_size", 0))
        fits = not memory or 2 * size <= MEMORY_SHARE * memory
        return (DEFAULTS.layout, "marlin") if fits else (DEFAULTS.layout,)

    def _converted(self, settings: ModelSettings) -> nn.Module:
        """Returns the model with settings; arrays that stay the same are shared."""
        free_memory()  # of the settings before
        model = self.load()
        model.update(self.stock.parameters())
        optimize(model, **settings.options)
        mx.eval(model.parameters())
        return model


def free_memory() -> None:
    """Frees models that are no longer used; they may refer to themselves."""
    gc.collect()
    mx.clear_cache()


def contradiction(
    stock: Callable[..., Any], other: Callable[..., Any], rows: Sequence[int]
) -> str | None:
    """Returns how a model's logits contradict stock MLX's, or None.

    After the same tokens the largest logit must be of the same token, unless stock
    MLX's logits of both tokens are as good as equal.
    """
    for m in rows:
        expected, actual = _logits(stock, m), _logits(other, m)
        precision = max(mx.finfo(expected.dtype).eps, LEAST_PRECISION)
        expected = expected.astype(mx.float32)
        largest = mx.max(expected, axis=-1)
        other_token = mx.argmax(actual, axis=-1, keepdims=True)
        gap = largest - mx.take_along_axis(expected, other_token, axis=-1)[:, 0]
        limit = ULPS * precision * mx.max(mx.abs(expected), axis=-1)
        is_wrong = ~(gap <= limit) | mx.any(mx.isnan(actual), axis=-1)
        if mx.any(is_wrong).item():
            row = cast(int, mx.argmax(is_wrong).item())
            apart, most = cast(float, gap[row].item()), cast(float, limit[row].item())
            return (
                f"row {row + 1} of {m} has another largest logit than stock MLX's, "
                f"whose logits are {apart:.3g} apart, more than rounding ({most:.3g})"
            )
    return None


def _logits(model: Callable[..., Any], m: int) -> mx.array:
    """Returns the logits of m random tokens that follow some others."""
    vocabulary = generation.vocabulary(cast(nn.Module, model))
    prefix = forward_race.PREFIX
    tokens = mx.array(generation.random_prompts(1, prefix + m, vocabulary))
    make_cache = forward_race.cache_factory(cast(nn.Module, model))
    assert make_cache is not None
    cache = make_cache()
    model(tokens[:, :prefix], cache=cache)
    found: mx.array = model(tokens[:, prefix:], cache=cache)
    return found[0]


def _timed(rows: Sequence[int]) -> tuple[int, ...]:
    return *rows, PROMPTS[0]


def _sample(model: nn.Module, rows: Sequence[int]) -> Samples:
    endless = Budget(now=monotonic, end=math.inf)
    return forward_race.sample(model, _timed(rows), PASSES, endless)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process measures with a value of the variable."""

    load: generation.Load  # Loads the model; must be importable
    settings: ModelSettings | None  # The settings; None for stock MLX
    rows: Sequence[int]  # Rows of the passes


Run = tuple[Samples, list[list[int]]]
"""Seconds of the passes, and by their rows the tokens of the largest logits."""


def measure(job: Job, value: Value) -> Run:
    """Measures in a new process: MLX reads the variable once, when it starts."""
    with environment(value):
        try:
            return generation.in_new_process(run, job)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a process with {VARIABLE}={value} ended") from error


def run(job: Job) -> Run:
    """Measures in this process."""
    model = job.load()
    mx.eval(model.parameters())
    if job.settings is not None:
        optimize(model, **job.settings.options)
        mx.eval(model.parameters())
    tokens = [mx.argmax(_logits(model, m), axis=-1).tolist() for m in _timed(job.rows)]
    return _sample(model, job.rows), cast("list[list[int]]", tokens)


@contextmanager
def environment(value: Value) -> Iterator[None]:
    """Sets the variable for new processes; None takes it away."""
    before = os.environ.pop(VARIABLE, None)
    if value is not None:
        os.environ[VARIABLE] = str(value)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


@dataclass(kw_only=True)
class Values:
    """Compares values of the variable with MLX's own.

    Each value is measured twice, in a mirrored order (A B C, C B A), so that a machine
    that slows down affects all alike.
    """

    job: Job  # What to measure
    measure: Callable[[Job, Value], Run]  # Measures a value
    # Whether there is no more time; then no value is chosen
    is_over: Callable[[], bool] = lambda: False
    comparisons: dict[int, Comparison] = field(default_factory=dict)
    failure: str | None = None  # Why MLX's own value could not be measured

    @property
    def best(self) -> Value:
        """The value that is faster than MLX's own; None if no value is."""
        winner = chosen([each for each in self.comparisons.values() if each.is_faster])
        return next((v for v, each in self.comparisons.items() if each is winner), None)

    def run(self) -> Iterator[Value]:
        """Yields each value after it was measured; then `best` is known."""
        order = [None, *VALUES]
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
        self.failure = failed.get(None)
        for value in VALUES if self.failure is None else ():
            reason = failed.get(value)
            self.comparisons[value] = self._compared(found[None], found[value], reason)

    def _compared(
        self, own: list[Run], others: list[Run], reason: str | None
    ) -> Comparison:
        if reason is None and any(run[1] != own[0][1] for run in (*own, *others)):
            reason = "the logits are other than with MLX's own value"
        if reason is not None:
            return Comparison(settings=self.job.settings, excluded=reason)
        samples = [[run[0] for run in runs] for runs in (own, others)]
        seconds = forward_race.medians(*samples)
        return Comparison(settings=self.job.settings, seconds=seconds)
