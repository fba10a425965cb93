"""The compiler that MLX uses in this process, and the options that MLX gives it.

MLX's wheels install NVRTC and CUDA's headers next to MLX. The library is found among
those that this process has loaded, so that it is the one MLX calls.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_marlin.backends.cuda import detection
from mlx_marlin.backends.cuda.compiling.kernel_text import INCLUDED
from mlx_marlin.backends.cuda.compiling.nvrtc import CompileError, MachineCode, Nvrtc

MAPPED = Path("/proc/self/maps")
"""The files that this process has mapped into memory, one per line."""
LIBRARY = re.compile(r"(/\S*/libnvrtc\.so\.(\d+)\S*)$")
HEADERS = {
    INCLUDED: "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    "#include <cuda/std/cstdint>\n"
}
"""What our kernels use of MLX's header, which exists in MLX's library only."""
WITH_FEATURES = 9
"""Compute capability (major) from which MLX compiles for one architecture alone, such
as "sm_90a"."""
DEFAULT_HOME = "/usr/local/cuda"


class UnavailableError(Exception):
    """Kernels cannot be compiled here. The message says what is missing."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler with the options of MLX."""

    compiler: Nvrtc  # The compiler
    arch: str  # The architecture to compile for, such as "sm_90a"
    options: tuple[str, ...]  # All options
    mlx: str  # Version of MLX
    identity: str  # Everything that machine code depends on besides the text

    def compile(self, text: str, function: str) -> MachineCode:
        """Compiles a text as MLX does."""
        return self.compiler.compile_apart(text, function, self.options, HEADERS)


def here() -> Toolchain | None:
    """Returns the tool chain of this process; None if MLX has no CUDA device."""
    device = detection.detect_device()
    if device is None:
        return None
    import mlx.core as mx

    library, major = _library()
    try:
        compiler = Nvrtc(library)
        size = library.stat().st_size  # tells builds of one version apart
    except (OSError, CompileError) as error:
        raise UnavailableError(f"NVRTC cannot be used: {error}") from error
    digits = device.arch.removeprefix("sm_")
    suffix = "a" if device.capability[0] >= WITH_FEATURES else ""
    arch = f"sm_{digits}{suffix}"
    options = (
        "--device-as-default-execution-space",
        f"--gpu-architecture={arch}",
        *(f"--include-path={path}" for path in _include_paths(mx.__file__, major)),
    )
    version = str(mx.__version__)  # type: ignore[attr-defined]
    identity = f"NVRTC {compiler.version} ({size} bytes), MLX {version}, {options}"
    return Toolchain(compiler, arch, options, version, identity)


def _library() -> tuple[Path, str]:
    """Returns the path of the NVRTC library that is loaded, and its major version."""
    try:
        lines = MAPPED.read_text("utf-8").splitlines()
    except OSError as error:
        raise UnavailableError(f"{MAPPED}: {error}") from error
    found = next((match for line in lines if (match := LIBRARY.search(line))), None)
    if found is None:
        raise UnavailableError("MLX has not loaded NVRTC in this process")
    return Path(found[1]), found[2]


def _include_paths(mlx: str | None, major: str) -> Iterator[Path]:
    """Yields the folders of headers in MLX's order."""
    root = Path(mlx or "").parent
    yield root / "include" / "cccl"
    installed = root.parent / "nvidia"
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    home = next((home for home in homes if home), DEFAULT_HOME)
    candidates = (
        installed / f"cu{major}" / "include",
        installed / "cuda_runtime" / "include",
        Path(home, "include"),
    )
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            yield folder
            return
    raise UnavailableError(f"no cuda_fp16.h in {', '.join(map(str, candidates))}")
