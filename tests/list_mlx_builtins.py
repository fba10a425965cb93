"""Writes data/mlx_builtins.json: what of Metal MLX's own shipped kernels use.

Usage: python tests/list_mlx_builtins.py

Downloads the macOS wheel of the installed MLX from the package index and reads it in a
temporary folder. Only names are kept: of functions, types, attributes and pragmas in
the kernels' headers, and the operand types of every matrix multiply-accumulate in the
compiled library. Headers `*_nax` count for the names of tensor operations only.
"""

import json
import re
import tempfile
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from peers import downloads
from support.metal_vocabulary import used, used_tensors

TARGET = Path(__file__).parent / "data" / "mlx_builtins.json"
PLATFORM = "macosx_14_0_arm64"
HEADER = re.compile(r"mlx/include/mlx/backend/metal/kernels/.*\.h")
# The accelerator of M5 and later: another library, which older chips do not have.
NEWEST = re.compile(r"nax")
MULTIPLY = re.compile(
    rb"air\.simdgroup_matrix_8x8_multiply_accumulate"
    rb"\.v64(b?f\d+)\.v64(b?f\d+)\.v64(b?f\d+)\.v64(b?f\d\d)"
)
TYPES = {b"f32": "float", b"f16": "half", b"bf16": "bfloat"}


def main() -> None:
    """Downloads the wheel and writes the list."""
    version = metadata.version("mlx")
    options = ("--only-binary=:all:", f"--platform={PLATFORM}")
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"mlx-metal=={version}"
        wheel = ZipFile(downloads.archive(wanted, options, Path(folder), "*.whl"))
        listed = {"mlx": version, "wheel": PLATFORM, **builtins(wheel)}
    TARGET.write_text(json.dumps(listed, indent=1) + "\n")


def builtins(wheel: ZipFile) -> dict[str, object]:
    """Reads names and operand types out of a wheel."""
    names: set[str] = set()
    tensor_names: set[str] = set()
    for path in wheel.namelist():
        if not HEADER.fullmatch(path):
            continue
        text = wheel.read(path).decode()
        if NEWEST.search(path):
            tensor_names |= used_tensors(text)
        else:
            names |= used(text)
    (library,) = (path for path in wheel.namelist() if path.endswith(".metallib"))
    operands = {
        tuple(TYPES[element] for element in found)
        for found in MULTIPLY.findall(wheel.read(library))
    }
    return {
        "names": sorted(names),
        "tensor_names": sorted(tensor_names),
        "multiply_accumulate": sorted(operands),
    }


if __name__ == "__main__":
    main()
