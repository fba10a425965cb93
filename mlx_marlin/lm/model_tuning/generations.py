"""Compares a model's generation under settings with stock MLX's, in turns."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.lm import decoding, generation
from mlx_marlin.lm.decoding import Decoded, Prompts
from mlx_marlin.lm.model_tuning import equal_tokens
from mlx_marlin.lm.model_tuning.comparison import Comparison
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.tuned_models.settings import (
    DEFAULTS,
    STREAMS,
    ModelSettings,
)

ROUNDS = 5
"""Pairs of generations, of which the median ratio counts."""
PROMPT, NEW = 128, 48
"""Tokens of a prompt, and tokens generated for each."""
MEMORY_SHARE = 0.8
"""Share of the GPU's memory that two copies of the weights may take."""

Decode = Callable[[nn.Module, Prompts, int], Decoded]
Speeds = tuple[float, float]
"""Stock MLX's time of a step, and of the prompts, over those of the settings."""


@dataclass(kw_only=True)
class Generations:
    """Generations with a model as stock MLX runs it, and as `optimize` converts it."""

    load: generation.Load  # Loads the model
    streams: Sequence[int] = STREAMS  # Numbers of prompts at a time
    decode: Decode = decoding.decode  # Generates and times
    prompt: int = PROMPT  # Tokens of a prompt
    new: int = NEW  # Tokens to generate for each
    rounds: int = ROUNDS  # Pairs of generations for each number of streams

    def __post_init__(self) -> None:
        self.stock = self.load()
        mx.eval(self.stock.parameters())
        tokens = generation.vocabulary(self.stock)
        self._prompts = {
            count: decoding.random_prompts(count, self.prompt, tokens)
            for count in self.streams
        }

    def compare(self, settings: ModelSettings) -> Comparison:
        """Returns how settings compare with stock MLX.

        Settings that fail, or whose tokens are not stock MLX's, are excluded.
        """
        steps: dict[int, float] = {}
        prompts: dict[int, float] = {}
        try:
            model = self._converted(settings)
            for count, given in self._prompts.items():
                if reason := self._other_tokens(model, given):
                    return Comparison(settings=settings, excluded=reason)
                steps[count], prompts[count] = self._speeds(model, given)
        except Exception as error:  # a kernel's or mlx-lm's: others may work
            reason = f"{type(error).__name__}: {error}"
            return Comparison(settings=settings, excluded=reason)
        return Comparison(settings=settings, speedups=steps, prompts=prompts)

    def layouts(self) -> tuple[str, ...]:
        """Returns the layouts whose weights fit the GPU's memory beside stock MLX's."""
        size = _bytes(self.stock)
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

    def _other_tokens(self, model: nn.Module, prompts: Prompts) -> str | None:
        """Returns how tokens differ from stock MLX's; these runs do not count."""
        expected = self.decode(self.stock, prompts, self.new)
        actual = self.decode(model, prompts, self.new)
        return equal_tokens.difference(
            self.stock, prompts, expected.tokens, actual.tokens
        )

    def _speeds(self, model: nn.Module, prompts: Prompts) -> Speeds:
        """Returns medians of ratios; in each pair, the other one comes first."""
        pairs: list[tuple[Decoded, Decoded]] = []
        for index in range(self.rounds):
            order = (self.stock, model) if index % 2 == 0 else (model, self.stock)
            first, second = (self.decode(each, prompts, self.new) for each in order)
            pairs.append((first, second) if index % 2 == 0 else (second, first))
        return (
            statistics.median(a.step_seconds / b.step_seconds for a, b in pairs),
            statistics.median(a.prompt_seconds / b.prompt_seconds for a, b in pairs),
        )


def free_memory() -> None:
    """Frees models that are no longer used; they may refer to themselves."""
    gc.collect()
    mx.clear_cache()


def _bytes(model: nn.Module) -> int:
    named = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return sum(array.nbytes for _, array in named)
