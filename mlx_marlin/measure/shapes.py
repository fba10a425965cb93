"""What `mlx-marlin bench` times by default: products of real models, and streams."""

from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512)
"""Default rows."""
QUICK_ROWS = (1, 8)
STREAMS = (1, 2, 4, 8, 16, 32)
"""Default numbers of prompts at a time."""
PROMPT, NEW = 128, 64
"""Default tokens of a prompt, and tokens generated for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a weight.

    Attributes:
        k: Input features.
        n: Output features.
        used_in: A model that has such a layer.
    """

    k: int
    n: int
    used_in: str


SHAPES = (
    Shape(k=4096, n=4096, used_in="Llama 3.1 8B, attention output"),
    Shape(k=4096, n=14336, used_in="Llama 3.1 8B, gate and up"),
    Shape(k=14336, n=4096, used_in="Llama 3.1 8B, down"),
    Shape(k=2560, n=9728, used_in="Qwen3 4B, gate and up"),
    Shape(k=9728, n=2560, used_in="Qwen3 4B, down"),
    Shape(k=5120, n=17408, used_in="Qwen3.5 27B, gate and up"),
    Shape(k=17408, n=5120, used_in="Qwen3.5 27B, down"),
)
"""Large layers of models of 4, 8 and 27 billion weights."""
QUICK_SHAPES = (Shape(k=512, n=256, used_in="no model"),)
"""What the emulator computes in a second."""
