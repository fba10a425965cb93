"""The text of a kernel, and where texts are read.

The files under `shaders/` are ordinary Metal and CUDA; nothing is pasted into them.
Each back end has a module `source` that puts a kernel's text together.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OPERANDS = ("x", "w", "scales", "biases")
NUMBERS = ("shape", "schedule")
FINISHING = ("bias", "multiplier", "residual")
FINISH = (*FINISHING, "parts")
ROTATION = ("places", "periods")
HEAD_NORMS = ("q_norm", "k_norm")
NORM = ("norm",)
SECOND = ("second", "second_scales")
"""Codes and scales of the second packed weight of an expert, which the first gates."""
EXPERT_BIASES = ("expert_bias", "second_bias")
"""Bias of an expert, and that of its second weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one kernel, as `mx.fast.metal_kernel` or `cuda_kernel` takes it.

    Attributes:
        name: Of the kernel.
        input_names: Of the buffers that it reads, in order.
        output_names: Of the buffers that it writes, in order.
        header: Functions.
        source: The body.
        atomic: Whether it adds to its output instead of writing it.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str
    atomic: bool = False


@cache
def shader_folder() -> Path:
    """Returns the folder of the shaders: of the installed package or the checkout."""
    package = Path(__file__).parents[1]
    candidates = (package / "shaders", package.parent / "shaders")
    for folder in candidates:
        if (folder / "kernels").is_dir():
            return folder
    raise FileNotFoundError(f"no shaders in {candidates[0]} or {candidates[1]}")


@cache
def digest_of_shaders() -> str:
    """Returns a digest that changes with any shader, such as in another version."""
    digest = hashlib.sha256()
    for file in sorted(each for each in shader_folder().rglob("*") if each.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read(file: str) -> str:
    """Returns the text of a file of the shaders' folder."""
    return (shader_folder() / file).read_text(encoding="ascii")
