"""Random quantized weights of any size, and what they stand for, in float64."""

import re
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Native = tuple[mx.array, mx.array, mx.array | None]
"""Codes, scales and biases, if there are, as `mx.quantize` lays them out."""

SPREAD = 0.02
"""Standard deviation of a weight, about that of a trained layer."""
FLOATING = {"mxfp4": (4, 32), "nvfp4": (4, 16)}
"""Bits and group size of the modes whose codes are small floats."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 of E2M1 stand for; 8 to 15 are their negatives."""
SCALE_BYTES = {"mxfp4": (119, 124), "nvfp4": (8, 24)}
"""First and past last byte of random scales: E8M0 2^-8 to 2^-4; E4M3 2^-6 to 2^-4."""


@dataclass(frozen=True)
class Format:
    """A format as the command line names it.

    Attributes:
        mode: "affine", "symmetric", "mxfp4" or "nvfp4".
        bits: Bits of a code.
        group_size: Weights that share a scale.
        dtype: Dtype of the activations, and of scales and biases that are no bytes.
    """

    mode: str
    bits: int
    group_size: int
    dtype: str = "float16"

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Reads "affine4g128", "symmetric8g64", "mxfp4", "nvfp4:bfloat16" and so on."""
        number = r"(?:(affine|symmetric)([2-68])g(32|64|128)|(mxfp4|nvfp4))"
        match = re.fullmatch(number + r"(?::(float16|bfloat16))?", text)
        if match is None:
            raise ValueError(
                f"format {text!r} is none of affine4g128, symmetric8g64, mxfp4, nvfp4 "
                f"and the like, with or without :float16 or :bfloat16"
            )
        mode, bits, group_size, floating, dtype = match.groups()
        if floating:
            return cls(floating, *FLOATING[floating], dtype or "float16")
        return cls(mode, int(bits), int(group_size), dtype or "float16")

    def __str__(self) -> str:
        size = f"{self.bits}g{self.group_size}" * (self.mode not in FLOATING)
        return f"{self.mode}{size}:{self.dtype}"

    @property
    def type(self) -> mx.Dtype:
        """The dtype as MLX has it."""
        return getattr(mx, self.dtype)

    @property
    def of_stock(self) -> str:
        """The mode in which stock MLX multiplies by the same weight."""
        return "affine" if self.mode == "symmetric" else self.mode


def random_native(format: Format, n: int, k: int) -> Native:
    """Draws a weight [n, k]: every code, scales around what `SPREAD` needs."""
    words = random_words(n, k * format.bits // 32)
    shape = (n, k // format.group_size)
    if format.mode in FLOATING:
        low, high = SCALE_BYTES[format.mode]
        return words, mx.random.randint(low, high, shape).astype(mx.uint8), None
    scales = random_scales(shape, format.bits).astype(format.type)
    if format.mode == "symmetric":
        return words, scales, None
    return words, scales, random_biases(scales, format.bits)


def zero_native(format: Format, n: int, k: int) -> Native:
    """Returns a weight of zeros, as large as a random one."""
    words = mx.zeros((n, k * format.bits // 32), mx.uint32)
    dtype = mx.uint8 if format.mode in FLOATING else format.type
    scales = mx.zeros((n, k // format.group_size), dtype)
    return words, scales, scales if format.mode == "affine" else None


def random_words(n: int, words: int) -> mx.array:
    # Halves: all 32 bits of a word are beyond what `randint` draws in one go.
    halves = mx.random.randint(0, 1 << 16, (n, 2 * words), dtype=mx.uint32)
    return halves.astype(mx.uint16).view(mx.uint32)


def random_scales(shape: tuple[int, ...], bits: int) -> mx.array:
    # Codes drawn evenly have a standard deviation of 2^bits / sqrt(12).
    middle = SPREAD * 12**0.5 / 2**bits
    return mx.random.uniform(0.5 * middle, 1.5 * middle, shape)


def random_biases(scales: mx.array, bits: int) -> mx.array:
    """Draws biases that leave a group's mean near zero, as quantizing does."""
    middle = (2**bits - 1) / 2
    times = mx.random.uniform(0.9 * middle, 1.1 * middle, scales.shape)
    return (-scales * times).astype(scales.dtype)


def biases_of_stock(format: Format, native: Native) -> mx.array | None:
    """Returns the biases with which stock MLX means the same weight."""
    _, scales, biases = native
    return -(2 ** (format.bits - 1)) * scales if format.mode == "symmetric" else biases


def taken(array: mx.array, places: NDArray[np.int64], axis: int = 0) -> mx.array:
    """Returns some rows or columns of a matrix, without MLX's gather.

    MLX's CUDA back end compiles a gather at its first use, for every number of
    dimensions at once; slices and their concatenation come with it.
    """
    ends = [(int(place), int(place) + 1) for place in places]
    if axis == 0:
        return mx.concatenate([array[start:stop] for start, stop in ends])
    return mx.concatenate([array[:, start:stop] for start, stop in ends], axis=1)


def decoded(format: Format, native: Native, rows: NDArray[np.int64]) -> Floats:
    """Returns some rows of a weight in float64, exactly."""
    words, scales, biases = (
        None if each is None else taken(each, rows) for each in native
    )
    codes = _codes(np.array(words), format.bits)
    if format.mode in FLOATING:
        values = np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)])[codes]
    else:
        zero = 2 ** (format.bits - 1) if format.mode == "symmetric" else 0
        values = codes.astype(np.float64) - zero
    weight = values * _spread(_scales(format, scales), format.group_size)
    return weight + (0 if biases is None else _spread(exact(biases), format.group_size))


def exact(array: mx.array) -> Floats:
    """Returns an MLX array of any float type as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Reads codes as a stream of bits, low code first."""
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(codes, axis=-1, bitorder="little")[..., 0]


def _scales(format: Format, scales: mx.array) -> Floats:
    if format.mode == "mxfp4":
        return 2.0 ** (np.array(scales).astype(np.float64) - 127)
    if format.mode == "nvfp4":
        return _e4m3(np.array(scales))
    return exact(scales)


def _e4m3(codes: NDArray[np.uint8]) -> Floats:
    exponent, mantissa = codes.astype(np.int64) >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


def _spread(factors: Floats, group_size: int) -> Floats:
    return np.repeat(factors, group_size, axis=-1)
