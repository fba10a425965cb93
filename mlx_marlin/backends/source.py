"""The text of a kernel, and the files that it is read from.

The files in `shaders/` are ordinary Metal and CUDA. The module `source` of a back end
composes the text of a kernel from them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

SUFFIXES = (".metal", ".cu", ".cuh")
OPERANDS = ("x", "w", "scales", "biases")
NUMBERS = ("shape", "schedule")
EPILOGUE_OPERANDS = ("bias", "multiplier", "residual")
EPILOGUE_INPUTS = (*EPILOGUE_OPERANDS, "parts")
ROTATION = ("positions", "freqs")
HEAD_NORMS = ("q_norm", "k_norm")
NORM = ("norm",)
SECOND = ("second", "second_scales")
"""Codes and scales of the second packed weight of an expert, which the first gates."""
EXPERT_BIASES = ("expert_bias", "second_bias")
"""Bias of an expert, and that of its second weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one kernel, as `mx.fast.metal_kernel` or `cuda_kernel` takes it."""

    name: str  # Name of the kernel
    input_names: tuple[str, ...]  # Names of the buffers that it reads, in order
    output_names: tuple[str, ...]  # Names of the buffers that it writes, in order
    header: str  # Functions that the body calls
    source: str  # The body
    atomic: bool = False  # Whether it adds to its output instead of writing it


@cache
def shader_folder() -> Path:
    """Returns the folder of the shaders, of the installed package or the checkout."""
    package = Path(__file__).parents[1]
    candidates = (package / "shaders", package.parent / "shaders")
    for folder in candidates:
        if (folder / "kernels").is_dir():
            return folder
    raise FileNotFoundError(f"no shaders in {candidates[0]} or {candidates[1]}")


@cache
def digest_of_shaders() -> str:
    """Returns a digest of all shaders: their paths and texts."""
    import hashlib  # its library takes milliseconds

    digest, root = hashlib.sha256(), shader_folder()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read(file: str) -> str:
    """Returns the text of a file in the shaders' folder."""
    return (shader_folder() / file).read_text(encoding="ascii")
