"""Parsing of the values of options."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from metal_emulator import regular_files
from metal_emulator.language.function_constants import Value

FILLS: dict[str, Callable[[list[int]], mx.array]] = {
    "random": lambda shape: mx.random.normal(shape, key=mx.random.key(0)),
    "arange": lambda shape: mx.arange(mx.zeros(shape).size).reshape(shape),
    "ones": mx.ones,
    "zeros": mx.zeros,
}
"""Contents of an input; random is normally distributed and reproducible."""

MAX_THREADS = 2**32
"""Threads of a grid, which Metal counts in 32 bits; they take minutes to emulate."""
MAX_ELEMENTS = 2**28
"""Elements of an array: 1 GiB of float32."""


def named(text: str, option: str) -> tuple[str, str]:
    """Splits NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not value:
        raise ValueError(f"{option} {text!r}, expected NAME=VALUE")
    return name, value


def all_named(texts: list[str], option: str) -> dict[str, str]:
    """Splits several NAME=VALUE; raises ValueError if a name occurs twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, value = named(text, option)
        if name in pairs:
            raise ValueError(f"{option} {text!r}: {name} is given twice, expected once")
        pairs[name] = value
    return pairs


def input_array(text: str) -> Any:
    """Returns the input that a text describes: none, a file, a number or an array."""
    if text == "none":
        return None
    if text.endswith(".npy"):
        return _load(text)
    if ":" in text:
        shape, dtype, fill = array_type(text, "--input")
        return FILLS[fill](shape).astype(dtype)
    if _is_integer(text):
        return integer(text, "--input", bits=64)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a .npy file nor a number nor SHAPE:DTYPE[:FILL]"
        ) from None


def _load(path: str) -> Any:
    # NumPy reads at once and says what is missing. MLX reads when a value is needed,
    # and 0.32.4 may raise the error of a short file in a later evaluation.
    # `np.load` would take an archive, and leave it open.
    try:
        with regular_files.open_file(path) as file:
            np.lib.format.read_array(file, allow_pickle=False)
        return mx.load(path)
    except Exception as error:  # NumPy evaluates the header, which raises anything
        raise ValueError(f"--input {path!r}, expected a .npy file: {error}") from None


def integer(text: str, option: str, bits: int = 32) -> int:
    """Parses a signed integer of the given number of bits."""
    most = 2 ** (bits - 1) - 1
    if len(text) > bits or not -most - 1 <= int(text) <= most:
        raise ValueError(f"{option} {text}, expected an integer of {bits} bits")
    return int(text)


def array_type(text: str, option: str) -> tuple[list[int], mx.Dtype, str]:
    """Parses SHAPE:DTYPE[:FILL], such as 8x512:float16:random."""
    shape, _, rest = text.partition(":")
    dtype, _, fill = rest.partition(":")
    sizes = shape.split("x")
    known = isinstance(getattr(mx, dtype, None), mx.Dtype)
    if not known or not all(map(_is_natural, sizes)) or (fill and fill not in FILLS):
        raise ValueError(
            f"{option} {text!r}, expected an array such as 8x512:float16:random"
        )
    lengths = [integer(size, option) for size in sizes]
    if math.prod(lengths) > MAX_ELEMENTS:
        raise ValueError(
            f"{option} {text!r} has {math.prod(lengths)} elements, expected at most "
            f"{MAX_ELEMENTS}"
        )
    return lengths, getattr(mx, dtype), fill or "random"


def byte_count(text: str) -> int:
    """Parses the size of a parameter in threadgroup memory."""
    if not _is_natural(text):
        raise ValueError(f"--threadgroup-memory {text!r}, expected a number of bytes")
    return integer(text, "--threadgroup-memory")


def template(text: str) -> tuple[str, mx.Dtype | int | bool | str]:
    """Parses NAME=VALUE, where VALUE is an integer, true, false, a dtype or a type."""
    name, value = named(text, "--template")
    if value in ("true", "false"):
        return name, value == "true"
    if _is_integer(value):
        return name, integer(value, f"--template {name}")
    dtype = getattr(mx, value, None)
    return name, dtype if isinstance(dtype, mx.Dtype) else value


def mlx_template(text: str) -> tuple[str, mx.Dtype | int | bool]:
    """Parses NAME=VALUE as `template`, without types that MLX cannot pass."""
    name, value = template(text)
    if isinstance(value, str):
        raise ValueError(
            f"--template {text!r}, expected an integer, true, false or a dtype"
        )
    return name, value


def constants(texts: list[str]) -> dict[str | int, Value]:
    """Parses several NAME=VALUE or INDEX=VALUE of function constants."""
    found: dict[str | int, Value] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not (key.isidentifier() or _is_natural(key)):
            raise ValueError(f"--constant {text!r}, expected NAME=VALUE or INDEX=VALUE")
        parts = [_number(part, text) for part in value.split(",")]
        name = key if key.isidentifier() else integer(key, "--constant")
        if name in found:
            raise ValueError(
                f"--constant {text!r}: {key} is given twice, expected once"
            )
        found[name] = parts[0] if len(parts) == 1 else parts
    return found


def _number(text: str, option: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    if _is_integer(text):
        return integer(text, "--constant", bits=65)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--constant {option!r}, expected true, false or numbers"
        ) from None


def triple(text: str, option: str) -> tuple[int, int, int]:
    """Parses X, X,Y or X,Y,Z; missing values are 1."""
    parts = text.split(",")
    if len(parts) > 3 or not all(map(_is_natural, parts)):
        raise ValueError(f"{option} {text!r}, expected one to three numbers")
    x, y, z = [*(integer(part, option) for part in parts), 1, 1][:3]
    return x, y, z


def grid(text: str) -> tuple[int, int, int]:
    """Parses the threads of a grid."""
    sizes = triple(text, "--grid")
    if math.prod(sizes) > MAX_THREADS:
        raise ValueError(
            f"--grid {text} has {math.prod(sizes)} threads, expected at most "
            f"{MAX_THREADS}"
        )
    return sizes


def _is_integer(text: str) -> bool:
    return _is_natural(text.removeprefix("-"))


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdecimal()
