"""`PackedWeight`: a quantized weight in the packed layout."""

from dataclasses import dataclass, field, fields
from operator import index
from typing import Any, Literal, Self

import mlx.core as mx

from mlx_marlin.argument_types import (
    check_arrays,
    check_format,
    check_integers,
    check_optional_arrays,
)
from mlx_marlin.weights import codebooks, layout
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import CODEBOOK, Format, format_of

GroupSize = int | Literal["channel"] | None
"""Weights that share a scale. "channel" is a whole row; None is the mode's default."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight:
    """A quantized weight [n, k], or a batch of them, in the packed ("marlin") layout.

    Attributes:
        words: Codes, uint32 [..., n tiles, k tiles, 64 * bits], in the order of
            `layout`.
        scales: Parameters of groups, [..., n tiles, groups, 32 or 64]: for each of the
            8 rows of a fragment, the scale, (scale, bias) or (scale, zero point) of the
            rows at distances 0, 8, 16 and 24. Of "k_quant", [..., n tiles, k / 256,
            32 * (9 or 10)] as uint16: the bytes of the groups in this order, then d, or
            (d, dmin), as float16 bits, in the order of one group. A codebook precedes
            them: see `weights.codebooks`.
        n: Rows of the weight: output features.
        k: Columns of the weight: input features.
        group_size: Weights along k that share a scale; k for a whole row.
        bits: Bits of a code.
        mode: MLX's "affine", "mxfp4", "mxfp8" or "nvfp4"; or "symmetric", which has no
            biases, "zero_point", "k_quant", "codebook" or "k_codebook".
        global_scale: Optional scale of the whole weight for "nvfp4", float32 of one
            element. As in MLX, weights are multiplied by 1/2688 of it.
        biases_or_global_scale: Operand that kernels receive in the place of biases.
        kind: The properties that determine which kernel serves a call: n, k,
            group_size, bits, mode, dtype of the scales, whether there is a global
            scale, and batch.
    """

    words: mx.array = field(repr=False)
    scales: mx.array = field(repr=False)
    n: int
    k: int
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"
    global_scale: mx.array | None = field(default=None, repr=False)
    biases_or_global_scale: mx.array = field(init=False, repr=False)
    kind: tuple[int, int, int, int, str, mx.Dtype, bool, tuple[int, ...]] = field(
        init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_arrays(words=self.words, scales=self.scales)
        check_optional_arrays(global_scale=self.global_scale)
        check_format(self.group_size, self.bits, self.mode)
        check_integers(n=self.n, k=self.k)
        for name in ("n", "k", "group_size", "bits"):
            # Integers of other libraries become Python's, so that cache keys are equal.
            object.__setattr__(self, name, index(getattr(self, name)))
        format = format_of(self.mode, self.bits)
        check_groups("PackedWeight", self.k, format, self.group_size)
        check_global_scale(self.global_scale, self.mode)
        n, k = layout.padded(self.n, self.k)
        tiles = (n // layout.TILE_N, k // layout.TILE_K)
        words = (*self.batch, *tiles, layout.tile_words(self.bits))
        records, stored = format.packed_records(k, self.group_size)
        scales = (*self.batch, tiles[0], records, layout.TILE_N * stored)
        if self.words.shape != words or self.words.dtype != mx.uint32:
            raise ValueError(
                f"words must be uint32 {words} for {self.k}→{self.n}, "
                f"got {dtype_name(self.words.dtype)} {self.words.shape}"
            )
        dtype = dtype_name(self.scales.dtype)
        if self.scales.shape != scales or dtype not in format.scale_dtypes:
            raise ValueError(
                f"scales must be one of {[*format.scale_dtypes]} with shape {scales}, "
                f"got {dtype} {self.scales.shape}"
            )
        scale = self.global_scale
        # Two elements: MLX passes arrays of less than 8 bytes in another address space.
        operand = self.scales if scale is None else mx.repeat(scale.reshape(1), 2)
        object.__setattr__(self, "biases_or_global_scale", operand)
        sizes = self.n, self.k, self.group_size, self.bits, self.mode
        kind = *sizes, self.scales.dtype, scale is not None, self.batch
        object.__setattr__(self, "kind", kind)

    @classmethod
    def from_operand(
        cls, words: mx.array, scales: mx.array, operand: mx.array, **format: Any
    ) -> Self:
        """Returns a weight with a given `biases_or_global_scale`.

        Args:
            words: As for the weight.
            scales: As for the weight.
            operand: The global scale twice, or `scales` itself if there is none.
            format: n, k, group_size, bits and mode.
        """
        scale = None if operand is scales else operand[:1]
        weight = cls(words=words, scales=scales, global_scale=scale, **format)
        object.__setattr__(weight, "biases_or_global_scale", operand)
        return weight

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns the arguments of the constructor, for `copy` and `pickle`.

        `kind` is computed again: it has an MLX dtype, which cannot be pickled.
        """
        names = (attribute.name for attribute in fields(self) if attribute.init)
        arguments = {name: getattr(self, name) for name in names}
        return _from_fields, (arguments,)

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading axes, such as (experts,); empty for one weight."""
        return self.words.shape[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., n, k) of the unpacked weight."""
        return *self.batch, self.n, self.k

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the scales."""
        return self.scales.dtype

    @property
    def codebook(self) -> mx.array | None:
        """The codebook, float32 [16]; None for formats without one."""
        if not format_of(self.mode, self.bits).has_codebook:
            return None
        return codebooks.tables(self.scales).reshape(-1, CODEBOOK)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, including padding."""
        return self.words.nbytes + self.scales.nbytes


def _from_fields(arguments: dict[str, Any]) -> PackedWeight:
    return PackedWeight(**arguments)


def check_groups(name: str, k: int, format: Format, group_size: int) -> None:
    """Raises ValueError if a weight of k columns cannot have this group size."""
    reason = format.why_not(group_size, k, "marlin")
    if reason is not None:
        raise ValueError(f"{name} [n, {k}] cannot be packed: {reason}")


def check_global_scale(scale: mx.array | None, mode: str) -> None:
    """Raises ValueError if there is a global scale that does not fit the mode."""
    if scale is None:
        return
    if mode != "nvfp4":
        raise ValueError(f"global_scale is for nvfp4, not for mode={mode!r}")
    if scale.size != 1 or scale.dtype != mx.float32:
        raise ValueError(
            f"global_scale must be float32 of one element, "
            f"got {dtype_name(scale.dtype)} with shape {scale.shape}"
        )
