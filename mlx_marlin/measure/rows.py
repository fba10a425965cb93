"""What a benchmark times by default, and found: its machine, a row for each time."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from mlx_marlin.planning.measurement import Machine
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.regular_files import quoted

ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512)
"""Default rows."""
QUICK_ROWS = (1, 8)
STREAMS = (1, 2, 4, 8, 16, 32)
"""Default numbers of prompts at a time."""
PROMPT, NEW = 128, 64
"""Default tokens of a prompt, and tokens generated for each."""
SHAPES = (
    (4096, 4096),  # Llama 3.1 8B, attention output
    (4096, 14336),  # Llama 3.1 8B, gate and up
    (14336, 4096),  # Llama 3.1 8B, down
    (2560, 9728),  # Qwen3 4B, gate and up
    (9728, 2560),  # Qwen3 4B, down
    (5120, 17408),  # Qwen3.5 27B, gate and up
    (17408, 5120),  # Qwen3.5 27B, down
)
"""k and n of large layers of models of 4, 8 and 27 billion weights."""
QUICK_SHAPES = ((512, 256),)
"""What the emulator computes in a second."""
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
STATUSES = ("passed", "failed", "timed out", "skipped")
"""What becomes of a stage of `make mac`."""
STOCK_MODEL = "stock MLX"
"""The model without our kernels, in rows of generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts(Machine):
    """What times depend on, and what else a reader may want to know of the machine."""

    memory_gb: int  # Memory in 2^30 bytes, 0 if MLX has no GPU here
    build: str  # Build of the system, which has the GPU compiler
    backend: str  # Back end of this package
    python: str  # Version of Python
    mlx_lm: str  # Version of mlx-lm, or ""
    mlx_marlin: str  # Version of this package
    # Commit of this package, or "" outside a repository; "-dirty" follows if files were
    # changed
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A median and how it was found."""

    seconds: float  # The median
    method: str  # A key of `METHODS`
    range: float = 0.0  # Interquartile range of the samples in seconds
    samples: int = 1  # Number of samples
    # Median of the later half of the samples over that of the earlier, minus 1
    drift: float = 0.0

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        if not 0 < self.seconds < inf:
            raise ValueError(f"seconds={self.seconds!r}, expected a time")

    @property
    def source(self) -> str:
        """ "measured" or "predicted"."""
        return METHODS[self.method]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """The time of one product of one arm by one clock."""

    problem: Problem  # The product, with the layout of the arm's weight
    # "ours", "mx.quantized_matmul", "dequantize + matmul", the kernel of a plan that
    # was asked for, such as "gemm_staged, 2 buffers", or "candidate: " and the name of
    # a plan that `tune` measured
    arm: str
    clock: str  # One of `CLOCKS`
    timing: Timing  # The time
    # The plan of an arm of ours; None for the others, and if the weight is decoded once
    plan: Plan | None = None
    handover: str | None = None  # Why stock MLX would serve the call, or None

    def __post_init__(self) -> None:
        check_choice("clock", self.clock, CLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """Speed of a model with some streams."""

    model: str  # Name of the model
    arm: str  # "ours" or "stock MLX"
    streams: int  # Sequences that are generated at a time
    prompt_tokens: int  # Tokens of each prompt
    new_tokens: int  # Tokens generated for each prompt
    prompt: Timing  # Time to the first token: one pass over all prompts
    step: Timing  # Time of a step, which adds one token to each stream

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
    """Time to the first token of one stream in a new process."""

    model: str  # Name of the model
    arm: str  # "ours" or "stock MLX"
    prompt_tokens: int  # Tokens of the prompt
    cold: Timing  # The first prompt of a process, which compiles its kernels
    warm: Timing  # A later prompt of that process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of `make mac`."""

    name: str  # Its name
    status: str  # One of `STATUSES`
    # How long it took on the computer that ran it, compiling included; never the time
    # of a kernel
    host_seconds: float = 0.0
    detail: str = ""  # What failed or was counted, in a line

    def __post_init__(self) -> None:
        check_choice("status", self.status, STATUSES)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuses a value that is none of the known ones."""
    if value not in choices:
        raise ValueError(f"{name}={quoted(value, 60)}, expected one of {(*choices,)}")
