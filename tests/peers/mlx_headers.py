"""The Metal headers of the installed MLX, out of its macOS wheel.

Nothing of them is part of this repository: they are downloaded into the user's cache
directory and handed to the emulator byte for byte.
"""

import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from peers import downloads

MLX = version("mlx")
FOLDER = "mlx/backend/metal/kernels/"
PRELUDE = ("bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h", "utils.h")
"""What MLX puts before every custom kernel: the emulator has its own."""

_PLATFORM = "macosx_14_0_arm64"
_INCLUDE = re.compile(r'^#include "mlx/backend/metal/kernels/([^"]+)".*\n', re.M)


def downloaded() -> Path:
    """The folder of the headers."""
    platform = ("--platform", _PLATFORM)
    return downloads.files("mlx-metal", MLX, f"mlx/include/{FOLDER}", ".h", *platform)


def flattened(*names: str) -> str:
    """Headers as one text, in order: each once, where it is first included."""
    headers = downloaded()
    seen = set(PRELUDE)

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (headers / name).read_text()
        # A header may end without a line break.
        return _INCLUDE.sub(lambda found: text_of(found[1]), text) + "\n"

    return "".join(map(text_of, names))


@cache
def affine() -> str:
    """The text with MLX's quantized kernels for affine weights."""
    return flattened("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")


def function(headers: Path, name: str, function: str) -> str:
    """One function template of a header, as it stands there."""
    text = (headers / name).read_text()
    start = text.rindex("\ntemplate", 0, text.index(f" {function}("))
    return text[start : text.index("\n}\n", start)] + "\n}\n"
