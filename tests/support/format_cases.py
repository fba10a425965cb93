"""Weights of every format, what they stand for, and the kernels that read them.

The oracles here are NumPy alone: codes are cut from a row's bits by hand, and the small
floats are spelled from their definitions.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_marlin.backends import graph
from mlx_marlin.backends.metal.kernel_limits import GEMV_ROWS, OPERANDS, operand_reason
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Kernel, Tile, k_tile
from mlx_marlin.planning.work.work import Work
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.formats import CHANNEL, DTYPE_BYTES, FORMATS, Format
from support.oracles import Floats, exact

Integers = NDArray[np.int64]

MLX_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
"""The schemes that `mx.quantized_matmul` knows."""
GROUPED = [
    (mode, bits, g)
    for (mode, bits), f in FORMATS.items()
    for g in f.group_sizes_in("marlin")
]
"""Every format with every group size; `CHANNEL` is a whole row."""


def layouts_of(mode: str, bits: int, group_size: int) -> tuple[str, ...]:
    """Returns the layouts that have groups of a size."""
    known = FORMATS[mode, bits]
    return tuple(
        layout for layout in known.layouts if group_size in known.group_sizes_in(layout)
    )


OF_MLX = [each for each in GROUPED if "mlx" in layouts_of(*each)]


WITH_CODEBOOK = ("codebook", "k_codebook")
SUPER_BLOCKS = ("k_quant", "k_codebook")
FLOATING = ("mxfp4", "mxfp8", "nvfp4")
"""Formats whose codes are small floats; those of all others are integers."""


def has_tensor_products(mode: str, group_size: int, dtype: str) -> bool:
    """Returns whether docs/m5.md promises `gemm_tensor` for a format and a dtype of x.

    It is told here anew, so that a kernel that refuses more makes tests fail.
    """
    if mode in WITH_CODEBOOK or dtype == "float32":
        return False
    return group_size != 16 or mode in FLOATING


def step_of(mode: str, bits: int, group_size: int) -> int:
    """Returns what k is to be a multiple of.

    A whole row of 192, unlike one of 128 or 256, is no other group size.
    """
    if group_size == CHANNEL:
        return 192
    return FORMATS[mode, bits].k_multiple(group_size)


SIGNED_K_QUANTS = (3, 6)
"""Bits of the K-quants with signed scales; the others have minima."""


def words_of_record(mode: str, bits: int) -> int:
    """Returns the 16-bit words of the scales of a super-block: 20, 18 or 10 bytes."""
    if mode == "k_codebook":
        return 5
    return 9 if bits in SIGNED_K_QUANTS else 10


NUMBERS = tuple((i * 5 % 16 - 6.5) * (1 + (2 * i + 1) / 2**19) for i in range(16))
"""A codebook, out of order, of float32 numbers that no half holds."""


GLOBAL_SCALE = 5 + 0x1FFFFD / 2**21
"""A float32 that no smaller float holds."""
NOT_A_NUMBER = 0x7F
"""E4M3's not-a-number, without its sign; nothing that quantizes writes it."""


def small_float(bits: int, exponent_bits: int, bias: int) -> float:
    """Returns what a small float stands for: a sign, an exponent, a mantissa."""
    mantissa_bits = {2: 1, 4: 3}[exponent_bits]
    mantissa = (bits & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    sign = -1.0 if bits >> mantissa_bits + exponent_bits else 1.0
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias))
    return float(sign * (1 + mantissa) * 2.0 ** (exponent - bias))


E2M1 = np.array([small_float(bits, 2, 1) for bits in range(16)])
E4M3 = np.array([small_float(bits, 4, 7) for bits in range(256)])
E8M0 = np.array([0.0, *(2.0 ** (bits - 127) for bits in range(1, 255)), np.inf])
"""Its least value is below float32's normal numbers and counts as zero."""


def read_codes(words: mx.array, bits: int) -> Integers:
    """Returns the codes [rows, ...] of rows of words: one stream of bits a row."""
    octets = np.array(words).astype("<u4").view(np.uint8)
    streams = np.unpackbits(octets, axis=1, bitorder="little")
    count = streams.shape[1] // bits
    digits = streams[:, : count * bits].reshape(-1, count, bits)
    return digits @ (1 << np.arange(bits))


def write_codes(codes: Integers, bits: int) -> mx.array:
    """Returns codes [rows, ...] as rows of words."""
    digits = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    streams = digits.reshape(len(codes), -1)
    return mx.array(np.packbits(streams, axis=1, bitorder="little").view("<u4"))


@dataclass(frozen=True, eq=False)
class Weight:
    """A quantized weight, in MLX's layout."""

    mode: str  # Its scheme
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    # Codes, scales and, where there are any, biases or zero points
    native: tuple[mx.array, ...]
    # The scale of all of an nvfp4 weight, as MLX means it, or None
    global_scale: mx.array | None = None
    numbers: tuple[float, ...] = NUMBERS  # The codebook of a weight with one

    @property
    def options(self) -> dict[str, Any]:
        """The format, in the words of `pack`."""
        options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        if self.mode in WITH_CODEBOOK:
            return options | {"codebook": mx.array(self.numbers)}
        return options

    @property
    def parts(self) -> tuple[Floats, Floats, Floats]:
        """What it is made of, each [n, k]: the weight is scale * value + bias."""
        codes = read_codes(self.native[0], self.bits)
        if self.mode == "k_quant":
            scale, bias = self._of_super_blocks()
            is_signed = self.bits in SIGNED_K_QUANTS
            return scale, codes - is_signed * 2.0 ** (self.bits - 1), bias
        if self.mode == "k_codebook":
            scale, bias = self._of_super_blocks()
            return scale, exact(mx.array(self.numbers))[codes], bias
        scale, bias = self._of_groups()
        if self.mode == "codebook":
            return scale, exact(mx.array(self.numbers))[codes], bias
        if self.mode == "affine":
            return scale, codes.astype(float), bias
        if self.mode == "symmetric":
            return scale, codes - 2.0 ** (self.bits - 1), bias
        if self.mode == "zero_point":
            return scale, codes.astype(float), -scale * bias
        if self.global_scale is not None:
            scale = scale * (self.global_scale.item() / (E2M1.max() * 448))
        return scale, (E2M1 if self.bits == 4 else E4M3)[codes], bias

    def _of_groups(self) -> tuple[Floats, Floats]:
        stored = self.native[1]
        if stored.dtype == mx.uint8:
            scales = (E4M3 if self.group_size == 16 else E8M0)[np.array(stored)]
        else:
            scales = exact(stored)
        biases = exact(self.native[2]) if len(self.native) == 3 else 0 * scales
        scale, bias = (np.repeat(s, self.group_size, axis=1) for s in (scales, biases))
        return scale, bias

    def _of_super_blocks(self) -> tuple[Floats, Floats]:
        """Returns scale and bias of each weight, from records of 20, 18 or 10 bytes."""
        stored = np.array(self.native[1])
        size = words_of_record(self.mode, self.bits)
        is_signed = self.bits in SIGNED_K_QUANTS or self.mode == "k_codebook"
        of_groups = size - (1 if is_signed else 2)
        records = stored.reshape(len(stored), -1, size)
        octets = np.ascontiguousarray(records[..., :of_groups]).view(np.uint8)
        d = np.ascontiguousarray(records[..., of_groups:]).view("<f2").astype(float)
        if is_signed:
            scale = d * octets.view(np.int8)
            bias = 0 * scale
        elif self.bits == 2:  # halves of bytes
            scale, bias = d[..., :1] * (octets % 16), -d[..., 1:] * (octets // 16)
        else:
            scale = d[..., :1] * octets[..., 0::2]
            bias = -d[..., 1:] * octets[..., 1::2]
        rows = (each.reshape(len(stored), -1) for each in (scale, bias))
        scale, bias = (np.repeat(each, self.group_size, axis=1) for each in rows)
        return scale, bias

    @property
    def decoded(self) -> Floats:
        """The weight [n, k] in float64."""
        scale, value, bias = self.parts
        return scale * value + bias


def offset_of(format: Format, operand: CodeForm = "offset") -> int:
    """Returns what kernels add to every code and take off the sum again.

    The first power of two that no code reaches, or 64 for 4 bits where that is cheaper;
    a symmetric code counts half its range too much besides.
    """
    if format.mode in (*FLOATING, *WITH_CODEBOOK) or operand == "exact":
        return 0
    is_cheapest = format.bits == 4 and operand == "offset"
    first = 64 if is_cheapest else 2**format.bits
    is_symmetric = format.codes in ("symmetric", "k_symmetric")
    return first + (2 ** (format.bits - 1) if is_symmetric else 0)


def operands_of(problem: Problem, kernel: Kernel) -> list[CodeForm]:
    """Returns the forms of codes that a kernel can multiply.

    Small floats and codebooks have no offset, so that all forms are alike.
    """
    plain = problem.format.mode in (*FLOATING, *WITH_CODEBOOK)
    return [
        each
        for each in (("exact",) if plain else OPERANDS)
        if operand_reason(problem, each, kernel) is None
    ]


def any_weight(
    mode: str, bits: int, group_size: int, n: int, k: int, *, dtype: str, seed: int
) -> Weight:
    """Makes a weight of random codes, every one as likely.

    Scales have any sign but those of bytes; one group in eight is constant, as MLX
    writes it: all codes 0 and a scale of -1e-7, or a zero scale.
    """
    draw = np.random.default_rng(seed)
    group_size = k if group_size == CHANNEL else group_size
    shape = (n, k // group_size)
    constant = draw.integers(0, 8, shape) == 0
    codes = draw.integers(0, 2**bits, (n, k))
    codes[np.repeat(constant, group_size, axis=1)] = 0
    if FORMATS[mode, bits].codes == "floating":
        codes[codes & 0x7F == NOT_A_NUMBER] = 0
        low, high = (1, 0x39) if group_size == 16 else (115, 122)
        scales = np.where(constant, 0 if group_size == 16 else 127, 0)
        scales = np.where(constant, scales, draw.integers(low, high, shape))
        native = [mx.array(scales.astype(np.uint8))]
        return Weight(mode, bits, group_size, (write_codes(codes, bits), *native))
    if mode in SUPER_BLOCKS:
        native = [_super_blocks(draw, mode, bits, n, k // 256)]
        return Weight(mode, bits, group_size, (write_codes(codes, bits), *native))
    step = draw.choice([-1, 1], shape) * draw.uniform(0.5, 1, shape) * 2.0**-bits
    scales = np.where(constant, -1e-7 if mode == "affine" else 0, step)
    stored = [scales]
    if mode == "affine":
        middle = -scales * (2.0**bits - 1) * draw.uniform(0.3, 0.7, shape)
        stored.append(np.where(constant, 0.125, middle))
    elif mode == "zero_point":
        stored.append(draw.integers(0, 2**bits, shape).astype(float))
    arrays = (mx.array(each.astype(np.float32)) for each in stored)
    native = [each.astype(getattr(mx, dtype)) for each in arrays]
    return Weight(mode, bits, group_size, (write_codes(codes, bits), *native))


def _super_blocks(
    draw: np.random.Generator, mode: str, bits: int, n: int, blocks: int
) -> mx.array:
    """Makes parameters of super-blocks: factors are normal, subnormal or 0.

    Their last bits are drawn too: a scale times a factor is no float16.
    """
    most = 64 if (mode, bits) in (("k_quant", 4), ("k_quant", 5)) else 256
    count = 8 if mode == "k_codebook" else 16
    octets = draw.integers(0, most, (n, blocks, count)).astype(np.uint8)
    shape = (n, blocks, words_of_record(mode, bits) - count // 2)
    sizes = draw.choice([0, 2.0**-24, 2.0**-15, 2.0**-10, 2.0**-9], shape)
    d = (sizes * draw.choice([-1, 1], shape) * draw.uniform(1, 8, shape)).astype("<f2")
    records = np.concatenate([octets.view("<u2"), d.view("<u2")], axis=-1)
    return mx.array(records.reshape(n, -1))


def rounded(values: Floats, dtype: str) -> Floats:
    """Returns values as a kernel stores them: a float32 sum, rounded to the dtype."""
    return exact(mx.array(values.astype(np.float32)).astype(getattr(mx, dtype)))


@dataclass(frozen=True)
class Variant:
    """One instance of a kernel, as far as formats matter to it."""

    mode: str  # The scheme
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    layout: str  # "mlx" or "marlin"
    dtype: str  # Of activations and result
    scale_dtype: str  # Of scales
    fragments: int  # 8-row fragments of x; 0 is gemv
    operand: CodeForm  # The form in which codes are multiplied
    split: bool  # Whether tiles are split, so that a reduce follows

    def __str__(self) -> str:
        kernel = f"gemm{self.fragments}" if self.fragments else "gemv"
        flags = f"-{self.operand}" + "-split" * self.split
        return (
            f"{self.mode}{self.bits}-{self.group_size}-{self.layout}-{self.dtype}-"
            f"{self.scale_dtype}-{kernel}{flags}"
        )

    @property
    def format(self) -> Format:
        return FORMATS[self.mode, self.bits]

    @property
    def step(self) -> int:
        """What k has to be a multiple of."""
        return step_of(self.mode, self.bits, self.group_size)

    @property
    def rows(self) -> int:
        """Rows of a gemv, which are part of the kernel: 1 to its most, all in turn."""
        return 1 + (self.bits + self.group_size // 32) % GEMV_ROWS[self.dtype]

    @property
    def facts(self) -> Iterator[tuple[object, ...]]:
        """What a covering set has to meet: pairs, and what decides the decoding."""
        lane = {16: "own scales", 32: "step 32"}.get(self.group_size, "step 64")
        values = (
            ("codes", self.format.codes),
            ("bits", self.bits),
            ("group", self.group_size),
            ("layout", self.layout),
            ("dtype", self.dtype, self.scale_dtype),
            ("fragments", self.fragments),
            ("split", self.split),
        )
        yield from combinations(values, 2)
        yield self.mode, self.bits, self.layout
        yield self.bits, self.layout, lane
        yield self.format.codes, self.operand, self.fragments
        yield self.bits, self.operand

    def weight(self, n: int, k: int, *, seed: int) -> Weight:
        return any_weight(
            self.mode,
            self.bits,
            self.group_size,
            n,
            k,
            dtype=self.scale_dtype,
            seed=seed,
        )

    def problem(self, m: int, n: int, k: int) -> Problem:
        return Problem(
            m=m,
            n=n,
            k=k,
            group_size=k if self.group_size == CHANNEL else self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=self.dtype,
            scale_dtype=self.scale_dtype,
            layout=self.layout,
        )

    def plan(self, m: int, n: int, k: int, *, threadgroups: int = 0) -> Plan:
        """Returns a plan that launches this instance; gemv has rows of its own."""
        rows = 8 * self.fragments or m
        tile = Tile(m=rows, k=k_tile(self.group_size))
        tiles = -(-m // rows) * -(-n // tile.n)
        work = data_parallel(tiles, -(-k // tile.k))
        if self.split:
            work = Work(
                strategy="stream_k",
                tiles=tiles,
                k_tiles=work.k_tiles,
                threadgroups=max(threadgroups, 1),
                slices=work.k_tiles,
            )
        return MetalPlan(
            problem=self.problem(m, n, k),
            kernel="gemm_register" if self.fragments else "gemv",
            tile=tile,
            fragments_m=self.fragments,
            simdgroups_k=2,
            work=work,
            reduction="workspace" if work.is_split else "none",
            operand=self.operand,
        )


def every_variant() -> Iterator[Variant]:
    """Every instance, less those that differ in nothing a format decides."""
    for (mode, bits, group_size), dtype, fragments, split in product(
        GROUPED, DTYPE_BYTES, (0, 1, 2), (False, True)
    ):
        format = FORMATS[mode, bits]
        narrow = (dtype, "float16") if dtype == "float32" else (dtype,)
        stored = set(narrow) & {*format.scale_dtypes}
        scales = sorted(stored) if stored else format.scale_dtypes
        layouts = layouts_of(mode, bits, group_size)
        for layout, scale in product(layouts, scales):
            first = Variant(
                mode, bits, group_size, layout, dtype, scale, fragments, "exact", split
            )
            kernel: Kernel = "gemm_register" if fragments else "gemv"
            problem = first.problem(1, 32, 1024)
            for operand in operands_of(problem, kernel):
                yield replace(first, operand=operand)


def covering(
    variants: Iterable[Variant], facts: Callable[[Variant], set[object]]
) -> list[Variant]:
    """Chooses few instances that meet every fact: always the one that meets most."""
    shuffled = [*variants]
    random.Random(0).shuffle(shuffled)  # of equals not the first, which are alike
    known = {each: facts(each) for each in shuffled}
    missing = set().union(*known.values())
    chosen = []
    while missing:
        known = {each: new for each in known if (new := known[each] & missing)}
        best = max(known, key=lambda each: len(known[each]))
        missing -= known[best]
        chosen.append(best)
    return chosen


VARIANTS = covering(every_variant(), lambda each: {*each.facts})


def run(plan: Plan, x: mx.array, weight: Weight) -> mx.array:
    """Runs a plan on a weight, packed first if the plan wants it so."""
    y = graph.product(plan)(x, *arguments(weight, plan.problem.layout))
    mx.eval(y)
    return y


def arguments(weight: Weight, layout: str) -> tuple[mx.array, mx.array, mx.array]:
    """Returns codes, scales and biases as a kernel takes them; none may be missing."""
    if layout == "marlin":
        packed = pack(
            *weight.native, **weight.options, global_scale=weight.global_scale
        )
        return packed.words, packed.scales, packed.biases_or_global_scale
    words, scales, *biases = weight.native
    if weight.global_scale is not None:
        biases = [mx.repeat(weight.global_scale.reshape(1), 2)]
    return words, scales, biases[0] if biases else scales


def activations(m: int, k: int, *, dtype: str, seed: int) -> mx.array:
    drawn = np.random.default_rng(seed).standard_normal((m, k), np.float32)
    return mx.array(drawn).astype(getattr(mx, dtype))
