"""What a benchmark found: its machine, and rows of one time each."""

from dataclasses import dataclass

from mlx_marlin.planning.measurement import Machine
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

CHAIN = "chain"
CLOCKS = (CHAIN, "independent")
"""Dependent products one after the other, as in decoding, and products that the GPU may
overlap."""
METHODS = {"wall time": "measured", "cost model": "predicted"}
"""How a time was found, and whether that is a measurement."""
OURS = "ours"
STOCK = "mx.quantized_matmul"
DEQUANTIZED = "dequantize + matmul"
CANDIDATE = "candidate"
"""What the arm of a plan that tuning compared begins with, before its name."""
STOCK_MODEL = "stock MLX"
"""The model without our kernels, in rows of generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts(Machine):
    """What times depend on, and what else a reader may want to know of the machine.

    Attributes:
        memory_gb: Memory in 2^30 bytes, 0 if MLX has no GPU here.
        build: Build of the system, which has the GPU compiler.
        backend: Back end of this package.
        python: Version of Python.
        mlx_lm: Version of mlx-lm, or "".
        mlx_marlin: Version of this package.
        commit: Commit of this package, or "" outside a repository; "-dirty" follows if
            files were changed.
    """

    memory_gb: int
    build: str
    backend: str
    python: str
    mlx_lm: str
    mlx_marlin: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A median and how it was found.

    Attributes:
        seconds: The median.
        method: A key of `METHODS`.
        range: Interquartile range of the samples in seconds.
        samples: Number of samples.
        drift: Median of the later half of the samples over that of the earlier, minus
            1.
    """

    seconds: float
    method: str
    range: float = 0.0
    samples: int = 1
    drift: float = 0.0

    @property
    def source(self) -> str:
        """ "measured" or "predicted"."""
        return METHODS[self.method]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """The time of one product of one arm by one clock.

    Attributes:
        problem: The product, with the layout of the arm's weight.
        arm: "ours", "mx.quantized_matmul", "dequantize + matmul", the kernel of a
            plan that was asked for, such as "gemm_staged, 2 buffers", or "candidate: "
            and the name of a plan that was tuned.
        clock: One of `CLOCKS`.
        timing: The time.
        plan: The plan of an arm of ours; None for the others, and if the weight is
            decoded once.
        handover: Why stock MLX would serve the call, or None.
    """

    problem: Problem
    arm: str
    clock: str
    timing: Timing
    plan: Plan | None = None
    handover: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """Speed of a model with some streams.

    Attributes:
        model: Name of the model.
        arm: "ours" or "stock MLX".
        streams: Sequences that are generated at a time.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens generated for each prompt.
        prompt: Time to the first token: one pass over all prompts.
        step: Time of a step, which adds one token to each stream.
    """

    model: str
    arm: str
    streams: int
    prompt_tokens: int
    new_tokens: int
    prompt: Timing
    step: Timing

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second of all streams together."""
        return self.streams * self.prompt_tokens / self.prompt.seconds

    @property
    def generation_rate(self) -> float:
        """Generated tokens per second of all streams together."""
        return self.streams / self.step.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenRow:
    """Time to the first token of one stream in a new process.

    Attributes:
        model: Name of the model.
        arm: "ours" or "stock MLX".
        prompt_tokens: Tokens of the prompt.
        cold: The first prompt of a process, which compiles its kernels.
        warm: A later prompt of that process.
    """

    model: str
    arm: str
    prompt_tokens: int
    cold: Timing
    warm: Timing
