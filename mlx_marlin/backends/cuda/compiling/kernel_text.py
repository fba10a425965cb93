"""The text that MLX compiles for a custom kernel, and MLX's folder of compiled ones.

MLX (0.32.4) finds a compiled kernel by its name and a hash of this text. If the text
differs from MLX's in one character, MLX does not find the kernel and compiles its own.
It looks in a folder, where it keeps only its own kernels: `NAME.ptx` with the machine
code and `NAME.txt` with the names of its functions.
"""

import ctypes
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.backends.cuda.compiling.nvrtc import MachineCode
from mlx_marlin.backends.launch import Launch, TemplateValue

NAMESPACE = "mlx::core::cu::"
INCLUDED = "mlx/backend/cuda/device/utils.cuh"
"""The header of MLX that each text includes; it is part of MLX's library."""
_BEFORE = f'\n#include "{INCLUDED}"\n\n#include <cooperative_groups.h>\n\n'
_OPENING = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
_CLOSING = "\n}\n\n} // namespace mlx::core::cu\n"
_SUFFIXES = ("_shape", "_strides", "_ndim")
"""MLX adds parameters for an input whose name the body uses with one of these."""
_CUDA_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "bool_": "bool",
    "bool": "bool",
}
"""CUDA's names of dtypes other than integers."""
_NAMES = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}
"""How MLX writes dtypes of template arguments into a kernel's name."""


def function(launch: Launch) -> str:
    """Returns the name of the CUDA function of a launch, without its namespace."""
    values = (_in_name(value) for _, value in launch.template)
    return f"custom_kernel_{launch.source.name}{''.join(values)}"


def qualified(launch: Launch) -> str:
    """Returns the name of the CUDA function of a launch in C++."""
    return NAMESPACE + function(launch)


def text(launch: Launch) -> str:
    """Returns the text that MLX compiles for a launch."""
    source = launch.source
    for name in source.input_names:
        for suffix in _SUFFIXES:
            if name + suffix in source.source:
                raise ValueError(
                    f"the kernel {source.name} reads {name + suffix}, expected a "
                    f"kernel without shapes and strides of its inputs"
                )
    arrays = zip(source.input_names, launch.dtypes, strict=True)
    results = zip(source.output_names, launch.outputs, strict=True)
    parameters = [f"    const {_cuda_type(dtype)}* {name}" for name, dtype in arrays]
    parameters += [f"    {_cuda_type(each.dtype)}* {name}" for name, each in results]
    constants = [_constant(name, value) for name, value in launch.template]
    return "".join(
        (
            _BEFORE,
            source.header,
            _OPENING,
            f"__global__ void {function(launch)}(\n",
            ",\n".join(parameters),
            ") {\n",
            *constants,
            "\n" if constants else "",
            source.source,
            _CLOSING,
        )
    )


def _in_name(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return "_t" if value else "_f"
    if isinstance(value, str):
        return f"_{_NAMES.get(value, f'{value}_t')}"
    return f"_{value}"


def _constant(name: str, value: TemplateValue) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, str):
        return f"  using {name} = {_cuda_type(value)};\n"
    return f"  constexpr int {name} = {value};\n"


def _cuda_type(dtype: str) -> str:
    return _CUDA_TYPES.get(dtype, f"{dtype}_t")


ENVIRONMENT = "MLX_PTX_CACHE_DIR"
"""MLX's variable with the path of the folder."""
TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Variables with the folder of temporary files, in the order of C++."""
LONGEST_NAME = 245
"""Longest name of a kernel that MLX does not distribute to several folders."""
SEED = 0xC70F6907
"""Seed of `std::hash` of a string in GNU's library of C++."""


def folder(mlx: str) -> Path:
    """Returns MLX's folder, which may not exist."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    found = (os.environ.get(name) for name in TEMPORARY)
    temporary = next((path for path in found if path), "/tmp")
    return Path(temporary, "mlx", mlx, "ptx")


def kernel_name(launch: Launch, text: str) -> str:
    """Returns the name by which MLX finds a compiled kernel."""
    content = text.encode()
    name = f"{function(launch)}_{_hash()(content, len(content), SEED):x}"
    if len(name) > LONGEST_NAME:
        raise ValueError(f"the name {name} has more than {LONGEST_NAME} characters")
    return name


def make(target: Path) -> None:
    """Makes MLX's folder if it is missing."""
    target.mkdir(parents=True, exist_ok=True)
    if (owner := target.stat().st_uid) != os.geteuid():
        raise PermissionError(f"{target} belongs to the user {owner}")


def place(target: Path, name: str, launch: Launch, compiled: MachineCode) -> None:
    """Puts a kernel into MLX's folder, unless it is there."""
    make(target)
    names = f"{qualified(launch)}\t{compiled.symbol}\n".encode()
    # MLX looks for the machine code first, so it is written last.
    for suffix, content in ((".txt", names), (".ptx", compiled.code)):
        path = target / f"{name}{suffix}"
        if not _has(path, content):
            _write(path, content)


def _has(path: Path, content: bytes) -> bool:
    try:
        return regular_files.read(path, len(content)) == content
    except (OSError, ValueError):
        return False


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically, because other processes read it."""
    handle, temporary = tempfile.mkstemp(suffix=".new", dir=path.parent)
    try:
        with regular_files.named(path), os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@cache
def _hash() -> Any:
    """Returns the function that `std::hash` calls, which MLX's library loads too."""
    library = ctypes.CDLL("libstdc++.so.6")
    function = library._ZSt11_Hash_bytesPKvmm
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    return function
