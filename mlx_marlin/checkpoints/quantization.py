"""Quantizes plain weights while a checkpoint is converted."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.weights import quantizers, scale_search
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS, MODE_DEFAULTS, format_of

QUANTIZERS = ("nearest", "search")
"""Round to nearest as `mx.quantize` does; search scales for the least squared error."""
CHUNK_BYTES = 4_000_000
"""Bytes in float32 of the rows that are quantized at a time, which caches hold."""

_EXPONENTS = {
    "float16": (mx.uint16, 0x7C00),
    "bfloat16": (mx.uint16, 0x7F80),
    "float32": (mx.uint32, 0x7F800000),
}
"""The bits of a number's exponent, which are all set if it is not finite: 28 times as
fast on a CPU as `mx.isfinite` of float16."""

Parts = tuple[mx.array, mx.array, mx.array | None]
"""Codes in words, scales, biases or zero points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How plain weights are quantized."""

    bits: int = 4  # Bits of a code
    group_size: int = 64  # Weights along k that share a scale; 0 for a whole row
    mode: str = "affine"  # A scheme of `weights.formats.MODES`
    quantizer: str = "nearest"  # One of `QUANTIZERS`
    # Bits of embeddings and the output head, as affine codes; 0 for plain ones, None
    # for the format of the others, as in `mlx_lm.convert`
    embedding_bits: int | None = None

    def __post_init__(self) -> None:
        format_of(self.mode, self.bits)
        if self.quantizer not in QUANTIZERS:
            raise ValueError(
                f"quantizer={self.quantizer!r}, expected one of {QUANTIZERS}"
            )
        if self.quantizer == "search" and self._is_floating:
            raise ValueError(f"quantizer='search' is for integers, not {self.mode!r}")
        sizes = format_of(self.mode, self.bits).group_sizes_in("marlin")
        if self.group_size not in sizes:
            raise ValueError(f"group_size={self.group_size}, expected one of {sizes}")
        known = (0, *(bits for mode, bits in FORMATS if mode == "affine"))
        if self.embedding_bits not in (None, *known):
            raise ValueError(
                f"embedding_bits={self.embedding_bits}, expected one of {known}"
            )

    def with_format(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> "Quantization":
        """Returns the quantization of a layer that has a format of MLX's."""
        default_size, default_bits = MODE_DEFAULTS[mode]
        return Quantization(
            group_size=default_size if group_size is None else group_size,
            bits=default_bits if bits is None else bits,
            mode=mode,
            quantizer=self.quantizer if mode == "affine" else "nearest",
        )

    def applies_to(self, k: int) -> bool:
        """Returns whether a weight of k columns can be quantized so."""
        format = format_of(self.mode, self.bits)
        return format.why_not(self.group_size or k, k, "marlin") is None

    def apply(self, w: mx.array) -> tuple[StoredWeight, float]:
        """Quantizes a weight [..., n, k] of float16, bfloat16 or float32."""
        if dtype_name(w.dtype) not in DTYPE_BYTES or w.ndim < 2:
            raise ValueError(
                f"weight {dtype_name(w.dtype)} {w.shape}, expected a matrix of one of "
                f"{[*DTYPE_BYTES]}"
            )
        rows = w.reshape(-1, w.shape[-1])
        step = rows_at_a_time(w.shape[-1])
        parts = (rows[first : first + step] for first in range(0, len(rows), step))
        return self.apply_to_rows(parts, w.shape, w.dtype)

    def apply_to_rows(
        self, parts: Iterable[mx.array], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> tuple[StoredWeight, float]:
        """Quantizes a weight whose rows come a few at a time.

        `parts`: rows [r, k], in order.
        `shape`: shape [..., n, k] of the weight.
        """
        if not self.applies_to(shape[-1]):
            raise ValueError(
                f"k={shape[-1]} cannot be quantized in groups of {self.group_size}"
            )
        chunks, changed, total = [], 0.0, 0.0
        for own in parts:
            chunk = self._chunk(own.astype(dtype))
            chunks.append(chunk)
            exact = own.astype(mx.float32)
            changed += _number(mx.square(chunk.decoded() - exact).sum())
            total += _number(mx.square(exact).sum())

        def joined(name: str) -> mx.array:
            whole = mx.concatenate([getattr(chunk, name) for chunk in chunks])
            return whole.reshape(*shape[:-1], -1)

        weight = replace(
            chunks[0],
            codes=joined("codes"),
            scales=joined("scales"),
            biases=None if chunks[0].biases is None else joined("biases"),
        )
        return weight, math.sqrt(changed / total) if total else 0.0

    @property
    def _is_floating(self) -> bool:
        return format_of(self.mode, self.bits).codes == "floating"

    def _chunk(self, w: mx.array) -> StoredWeight:
        bits, exponent = _EXPONENTS[dtype_name(w.dtype)]
        if _number(mx.max(w.view(bits) & exponent)) == exponent:
            raise ValueError("a weight is NaN or infinite")
        size = self.group_size or w.shape[-1]
        parts = self._nearest(w, size)
        if self.quantizer == "search":
            parts = self._searched(w, parts, size)
        mx.eval([part for part in parts if part is not None])
        codes, scales, biases = parts
        return StoredWeight(
            codes=codes,
            scales=scales,
            biases=biases,
            group_size=size,
            bits=self.bits,
            mode=self.mode,
        )

    def _nearest(self, w: mx.array, size: int) -> Parts:
        if self.mode == "symmetric":
            return *quantizers.symmetric(w, size, self.bits), None
        if self.mode == "zero_point":
            return quantizers.zero_point(w, size, self.bits)
        if size not in format_of(self.mode, self.bits).group_sizes:
            return quantizers.affine(w, size, self.bits)
        codes, scales, *biases = mx.quantize(w, size, self.bits, self.mode)
        return codes, scales, biases[0] if biases else None

    def _searched(self, w: mx.array, nearest: Parts, size: int) -> Parts:
        groups = w.astype(mx.float32).reshape(len(w), -1, size)
        _, scales, biases = nearest
        first = scales[..., None].astype(mx.float32)
        if self.mode == "affine":
            assert biases is not None
            start = first, biases[..., None].astype(mx.float32)
            codes, scales, biases = scale_search.affine(
                groups, self.bits, w.dtype, start
            )
            biases = biases.squeeze(-1)
        else:
            zeros = mx.full(first.shape, 2.0 ** (self.bits - 1))
            if biases is not None:
                zeros = biases[..., None].astype(mx.float32)
            codes, scales = scale_search.around_zero(
                groups, self.bits, w.dtype, first, zeros
            )
        words = words_of_codes(codes.reshape(len(w), -1), self.bits)
        return words, scales.squeeze(-1), biases


def rows_at_a_time(k: int) -> int:
    """Returns how many rows of k columns are quantized at a time."""
    return max(1, CHUNK_BYTES // (4 * k))


def _number(value: mx.array) -> float:
    return float(cast(float, value.item()))


def quantization_of(bits: int | None) -> Quantization | None:
    """Returns how `requantize=bits` quantizes: affine codes in groups of 64."""
    if bits is None:
        return None
    known = [width for mode, width in FORMATS if mode == "affine"]
    if isinstance(bits, bool) or bits not in known:
        raise ValueError(f"requantize={bits!r}, expected one of {known}")
    return Quantization(bits=bits)


def check_nothing_asked(path: str | Path, quantization: Quantization | None) -> None:
    """Raises a ValueError if weights of a folder are to be quantized anew."""
    if quantization is not None:
        raise ValueError(
            f"{path}: requantize={quantization.bits}, which is for GGUF files only; "
            f"`mlx-marlin convert --bits` quantizes plain weights"
        )
