"""llama.cpp's Metal text, out of the source distribution of `llama-cpp-python`.

Nothing of it is part of this repository: it is downloaded into the user's cache folder
and handed to the emulator byte for byte.
"""

import ctypes
import functools
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import metal_emulator
from peers import downloads

PACKAGE = "llama-cpp-python"
VERSION = "0.3.16"
FILES = ("ggml-metal/ggml-metal.metal", "ggml-metal/ggml-metal-impl.h", "ggml-common.h")
"""What is kept, in llama.cpp's folder `ggml/src`."""


def downloaded() -> Path:
    """Returns the folder of the files, filled when the cache has none."""
    return downloads.kept(PACKAGE, VERSION, _fill)


def _fill(folder: Path, target: Path) -> None:
    # pip runs the distribution's build back end to read its metadata; nothing is built.
    wanted, source = f"{PACKAGE}=={VERSION}", (f"--no-binary={PACKAGE}",)
    with tarfile.open(downloads.archive(wanted, source, folder, "*.tar.gz")) as members:
        for member in members:
            member.name = member.name.partition("/ggml/src/")[2]
            if member.name in FILES:
                members.extract(member, target, filter="data")


def library(*definitions: str) -> metal_emulator.Library:
    """Returns the kernels of the text, behind `#define` lines."""
    folder = downloaded()
    before = "".join(f"#define {each}\n" for each in definitions)
    file = folder / FILES[0]
    return metal_emulator.library(
        f"{before}#line 1\n{file.read_text()}",
        name=file.name,
        include=[folder, file.parent],
    )


_STRUCT = r"typedef struct\s*\{(?P<fields>[^}]*)\}\s*ggml_metal_kargs_"
_FIELD = re.compile(r"(?P<type>\w+)\s+(?P<name>\w+)(?:\[(?P<count>\d+)\])?;")
_TYPES = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "int": ctypes.c_int32,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_uint64,
    "uint64_t": ctypes.c_uint64,
}


@functools.cache
def _struct(name: str) -> type[ctypes.Structure]:
    text = (downloaded() / FILES[1]).read_text()
    found = re.search(rf"{_STRUCT}{name};", text)
    assert found is not None, name
    fields: list[tuple[str, Any]] = []
    for field in _FIELD.finditer(found["fields"]):
        kind: Any = _TYPES[field["type"]]
        fields.append(
            (field["name"], kind * int(field["count"] or 1) if field["count"] else kind)
        )
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def arguments(name: str, **values: Any) -> bytes:
    """Returns the bytes of the struct `ggml_metal_kargs_NAME`."""
    struct = _struct(name)
    chosen = {}
    for field, kind, *_ in struct._fields_:
        value = values[field]
        chosen[field] = kind(*value) if isinstance(value, tuple) else value
    return bytes(struct(**chosen))


def sizes(digit: str, array: npt.NDArray[Any], row_bytes: int = 0) -> dict[str, int]:
    """Returns the extents and strides of a tensor of at most four dimensions."""
    shape = (1,) * (4 - array.ndim) + array.shape
    steps = [array.itemsize, row_bytes or array.itemsize * shape[3]]
    steps += [steps[1] * shape[2], steps[1] * shape[2] * shape[1]]
    return {
        **{f"ne{digit}{at}": size for at, size in enumerate(reversed(shape))},
        **{f"nb{digit}{at}": step for at, step in enumerate(steps)},
    }


@dataclass(frozen=True)
class Llama:
    """The kernels, and what draws their operands."""

    library: metal_emulator.Library  # The text
    random: np.random.Generator  # Draws

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        return self.random.standard_normal(shape, np.float32)

    def run(self, *call: Any, **options: Any) -> npt.NDArray[Any]:
        """Launches a kernel in trace mode."""
        with metal_emulator.emulated(trace=True):
            return self.launch(*call, **options)

    def launch(
        self,
        name: str,
        inputs: Mapping[str, Any],
        output: npt.NDArray[Any],
        groups: tuple[int, int, int],
        threads: tuple[int, int, int],
        memory: int = 0,
    ) -> npt.NDArray[Any]:
        """Runs the kernel `kernel_NAME`."""
        kernel = self.library.function(f"kernel_{name}")
        arrays: dict[int, mx.array] = {}
        given = {
            key: arrays.setdefault(id(value), mx.array(value))
            if isinstance(value, np.ndarray)
            else value
            for key, value in inputs.items()
        }
        (result,) = kernel(
            inputs=given,
            output_shapes=[output.shape],
            output_dtypes=[mx.array(output[:0]).dtype],
            grid=tuple(g * t for g, t in zip(groups, threads, strict=True)),
            threadgroup=threads,
            threadgroup_memory=dict.fromkeys(kernel.threadgroup_memory, memory),
        )
        return np.array(result)
