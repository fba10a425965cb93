"""A quantized weight as a checkpoint stores it, and as it is written."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.weights import codebooks, super_blocks
from mlx_marlin.weights.formats import MODE_DEFAULTS, format_of
from mlx_marlin.weights.packed_weight import PackedWeight
from mlx_marlin.weights.quantizers import decoded

Result = TypeVar("Result")

TILES = "marlin-tiles-1"
"""Tag of the order of codes and scales in `weights.layout`; another order gets another
tag."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredWeight:
    """A quantized weight [n, k], or a batch of them, in rows of codes.

    Reading it from a checkpoint rounds nothing: `codes`, `scales` and `biases` hold the
    same numbers as the file, unless `original` says otherwise.
    """

    # uint32 [..., n, k * bits / 32], low code first, as `mx.quantize` writes
    codes: mx.array
    # [..., n, k / group_size]; of "k_quant" and "k_codebook" the parameters of super-
    # blocks, as in `weights.super_blocks`
    scales: mx.array
    # Biases of "affine", or whole zero points of "zero_point", in the dtype of
    # `scales`; None for other modes
    biases: mx.array | None = None
    group_size: int  # Weights along k that share a scale
    bits: int  # Bits of a code
    mode: str  # A mode of `weights.formats`
    global_scale: mx.array | None = None  # As in `PackedWeight`
    # int32 [k]: column i multiplies feature `input_order[i]` of x. None if columns are
    # in the order of x
    input_order: mx.array | None = None
    # The type that was decoded and quantized anew, such as "IQ2_XS"; empty if the
    # numbers are the file's
    original: str = ""
    # Frobenius norm of what that changed, relative to that of the weight
    error: float = 0.0
    codebook: mx.array | None = None  # As for `pack`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., n, k] of the weight that this stands for."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 32 // self.bits

    def with_float_scales(self) -> "StoredWeight":
        """Returns the same weight without super-blocks, exactly.

        Their scales and biases become float32.
        """
        format = format_of(self.mode, self.bits)
        if not format.has_super_blocks:
            return self
        stored = self.scales, format, self.group_size
        scales, biases = super_blocks.float_parameters(*stored)
        mode = "symmetric" if biases is None else "affine"
        mode = "codebook" if format.has_codebook else mode
        return replace(self, scales=scales, biases=biases, mode=mode)

    def checked(self) -> "StoredWeight":
        """Returns the same weight, as "symmetric" if all zero points are in the middle.

        Readers do not evaluate scales, because the layers of a checkpoint are renamed
        before the first of them is used: evaluated scales would stay in memory.
        """
        if self.global_scale is not None:
            self._check_global_scale(self.global_scale)
        format = format_of(self.mode, self.bits)
        codebooks.checked(self.codebook, format)
        if format.has_super_blocks:
            factors = super_blocks.factors_of(self.scales, format, self.group_size)
            check_finite(factors)
            return self
        if self.scales.dtype == mx.uint8:
            nan = 0x7F if self.mode == "nvfp4" else 0xFF  # E4M3 has a sign, E8M0 none
            if mx.any((self.scales & nan) == nan):
                raise ValueError("a scale is NaN")
            return self
        check_finite(self.scales)
        if self.biases is None:
            return self
        check_finite(self.biases)
        if self.mode != "zero_point":
            return self
        largest = 2**self.bits - 1
        if mx.any(self.biases > largest):
            raise ValueError(
                f"a zero point is {largest + 1}, expected at most {largest}: tools "
                f"disagree on one that GPTQ's version 1 stores as {largest}; write the "
                f"checkpoint as gptq_v2"
            )
        if mx.all(self.biases == 2 ** (self.bits - 1)):
            return replace(self, biases=None, mode="symmetric")
        return self

    def _check_global_scale(self, scale: mx.array) -> None:
        count = prod(self.shape[:-2])
        is_float = scale.dtype == mx.float32
        if self.mode != "nvfp4" or scale.size != count or not is_float:
            raise ValueError(
                f"global_scale {scale.dtype} {scale.shape} for mode={self.mode!r}, "
                f"expected {count} float32 numbers, for nvfp4 only"
            )
        check_finite(scale)

    def decoded(self) -> mx.array:
        """Returns the values of the weight in float32, columns in the stored order."""
        if self.global_scale is None or len(self.shape) == 2:
            return self._given_to(decoded)
        parts = self.codes, self.scales, self.global_scale.reshape(-1, 1)
        matrices = [
            replace(self, codes=codes, scales=scales, global_scale=factor).decoded()
            for codes, scales, factor in zip(*parts, strict=True)
        ]
        return mx.stack(matrices)

    def values(self) -> mx.array:
        """Returns the values of the weight in float32, columns in the order of x."""
        order, values = self.input_order, self.decoded()
        return values if order is None else mx.take(values, mx.argsort(order), axis=-1)

    def packed(self) -> PackedWeight:
        """Returns the same weight in the packed layout, exactly."""
        return self._given_to(pack)

    def _given_to(self, function: Callable[..., Result]) -> Result:
        return function(
            self.codes,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.global_scale,
            codebook=self.codebook,
        )


def check_finite(scales: mx.array) -> None:
    """Raises a ValueError if a scale is NaN or infinite."""
    if not mx.all(mx.isfinite(scales)):
        raise ValueError("a scale is NaN or infinite")


class PackedLayer(NamedTuple):
    """A packed weight, and the order of its columns as in `StoredWeight`."""

    weight: PackedWeight
    input_order: mx.array | None = None

    def packed(self) -> PackedWeight:
        """Returns the packed weight."""
        return self.weight

    def stored(self) -> StoredWeight:
        """Returns the same weight in rows of codes, exactly."""
        codes, scales, *biases = unpack(self.weight)
        return StoredWeight(
            codes=codes,
            scales=scales,
            biases=biases[0] if biases else None,
            group_size=self.weight.group_size,
            bits=self.weight.bits,
            mode=self.weight.mode,
            global_scale=self.weight.global_scale,
            input_order=self.input_order,
            codebook=self.weight.codebook,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint, not read yet."""

    # Name of the parameter in mlx-lm, such as "model.layers.0.self_attn.q_proj.weight"
    name: str
    format: str  # Name of the stored format, such as "Q4_K", "gptq" or "F16"
    # Shape of the weight or array; of a foreign layer in a folder, that of its codes
    shape: tuple[int, ...]
    nbytes: int  # Bytes in the file
    read: Callable[[], StoredWeight | PackedLayer | mx.array]  # Reads it


DECODED_BYTES = 32_000_000
"""Bytes of decoded weights that are in memory at a time to compute an error."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Written:
    """A quantized layer's part of a checkpoint."""

    arrays: dict[str, mx.array]  # Arrays by the last part of their name
    record: dict[str, Any]  # What config.json says about the layer
    # Relative Frobenius error of the weight, 0 if nothing is rounded
    error: float = 0.0


def packed_target(weight: StoredWeight | PackedLayer) -> Written:
    """Returns a weight in our packed layout, exactly."""
    packed = weight.packed()
    arrays = {"words": packed.words, "packed_scales": packed.scales}
    if packed.global_scale is not None:
        arrays["global_scale"] = packed.global_scale
    if weight.input_order is not None:
        arrays["input_order"] = weight.input_order
    return Written(arrays=arrays, record=record_of(packed))


def record_of(packed: PackedWeight) -> dict[str, Any]:
    """Returns what config.json says about a packed layer."""
    return {
        "layout": TILES,
        "n": packed.n,
        "k": packed.k,
        "group_size": packed.group_size,
        "bits": packed.bits,
        "mode": packed.mode,
    }


def mlx_target(weight: StoredWeight | PackedLayer) -> Written:
    """Returns a weight in MLX's layout, for `mlx_lm.load`.

    Zero points become biases, and super-blocks get float32 scales. A bias is rounded if
    the product of scale and zero point has more digits than the scales' dtype.
    """
    if isinstance(weight, PackedLayer):
        weight = weight.stored()
    weight = weight.with_float_scales()
    if weight.input_order is not None:
        raise ValueError("MLX's layers take columns in the order of x (act-order)")
    if weight.global_scale is not None and len(weight.shape) == 2:
        raise ValueError("MLX's linear layers have no global scale")
    if weight.codebook is not None:
        raise ValueError("MLX has no codebooks")
    mode = weight.mode if weight.mode in MODE_DEFAULTS else "affine"
    sizes = format_of(mode, weight.bits).group_sizes
    if weight.group_size not in sizes:
        raise ValueError(
            f"MLX has no {mode} weights in groups of {weight.group_size}, but {sizes}"
        )
    arrays = {"weight": weight.codes, "scales": weight.scales}
    biases, error = _biases(weight)
    if biases is not None:
        arrays["biases"] = biases
    record: dict[str, Any] = {
        "group_size": weight.group_size,
        "bits": weight.bits,
        "mode": mode,
    }
    if weight.global_scale is not None:  # one for each expert
        arrays["global_scale"] = weight.global_scale
        record["global_scale"] = True
    return Written(arrays=arrays, record=record, error=error)


def _biases(weight: StoredWeight) -> tuple[mx.array | None, float]:
    """Returns the biases of affine codes, and the relative error of rounding them."""
    if weight.mode in MODE_DEFAULTS:
        return weight.biases, 0.0
    zeros: mx.array | float = 2.0 ** (weight.bits - 1)
    if weight.biases is not None:
        zeros = weight.biases.astype(mx.float32)
    scales = weight.scales.astype(mx.float32)
    exact = -scales * zeros
    biases = exact.astype(weight.scales.dtype)
    change = biases.astype(mx.float32) - exact
    if not mx.any(change):
        return biases, 0.0
    return biases, _relative(weight, change)


def _relative(weight: StoredWeight, change: mx.array) -> float:
    """Returns the Frobenius norm of a change of biases relative to the weight's.

    The weight is decoded in float32, so many rows at a time that this takes
    `DECODED_BYTES`.
    """
    flat = {
        name: array.reshape(-1, array.shape[-1])
        for name in ("codes", "scales", "biases")
        if (array := getattr(weight, name)) is not None
    }
    rows = max(1, DECODED_BYTES // (4 * weight.shape[-1]))
    total = 0.0
    for first in range(0, len(flat["codes"]), rows):
        own = {name: array[first : first + rows] for name, array in flat.items()}
        values = replace(weight, **own).decoded()
        total += float(cast(float, mx.square(values).sum().item()))
    changed = float(cast(float, mx.square(change).sum().item())) * weight.group_size
    return math.sqrt(changed / total) if total else 0.0
