"""Drawn products of rows with chosen weights: their arrays and what they must give."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.products.packing import pack
from mlx_marlin.products.request import Gather, Request
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles
from support.format_cases import Weight
from support.profiles import profile

FORMATS = [
    ("affine", 4, 64),
    ("affine", 4, 32),
    ("affine", 1, 32),
    ("affine", 3, 64),
    ("affine", 8, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("symmetric", 6, 64),
    ("zero_point", 5, 32),
    ("codebook", 4, 32),
    ("k_codebook", 4, 32),
    ("k_quant", 2, 16),
    ("k_quant", 4, 32),
    ("k_quant", 6, 16),
]
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}
STOCK_AFFINE = 4
"""How many of `LIMITS` stock MLX's affine products may miss: they round weights."""
INSTANCES = [
    (form, layout, [*LIMITS][(i + j) % 3])
    for i, form in enumerate(FORMATS)
    for j, layout in enumerate(format_of(*form[:2]).layouts)
]
"""Formats in all their layouts, each with the dtype of the quick profile."""
K = 128
M1, M3 = Device.named("Apple M1"), Device.named("Apple M3")
DEVICES = st.sampled_from([M1, M3])


def weights(
    experts: int, n: int, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, ...]:
    w = mx.random.normal((experts, n, K), key=mx.random.key(n)).astype(dtype)
    return mx.quantize(w, group_size=group_size, bits=bits, mode=mode)


@dataclass(frozen=True)
class Call:
    """A product of rows with experts: few rows or many, experts chosen or not."""

    form: tuple[str, int, int]  # Mode, bits and group size
    layout: str  # "mlx" or "marlin"
    experts: int  # How many weights there are
    n: int  # Rows of a weight
    k: int  # Columns of a weight
    rows: int  # Rows of x
    chosen: list[int]  # The expert of each pair
    dtype: str  # Of activations and scales
    seed: int  # Of everything random

    @cached_property
    def weight(self) -> Weight:
        """All experts' rows below each other, in MLX's layout."""
        shape = self.experts * self.n, self.k
        dtype = self.dtype
        return format_cases.any_weight(*self.form, *shape, dtype=dtype, seed=self.seed)

    @property
    def decoded(self) -> oracles.Floats:
        """The weights [experts, n, k] in float64."""
        return self.weight.decoded.reshape(self.experts, self.n, self.k)

    @property
    def x(self) -> mx.array:
        """Activations [rows, 1, k]."""
        x = format_cases.activations(
            self.rows, self.k, dtype=self.dtype, seed=self.seed
        )
        return x[:, None]

    @property
    def sources(self) -> list[int]:
        """The row of x of each pair."""
        random = np.random.default_rng(self.seed)
        drawn: list[int] = random.integers(0, self.rows, len(self.chosen)).tolist()
        return drawn

    def stored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights as `gather_qmm` takes them, and the options with them."""
        shape = self.experts, self.n, -1
        native = tuple(each.reshape(shape) for each in self.weight.native)
        options = self.weight.options
        if self.layout == "marlin":
            return (pack(*native, **options),), {}
        return native, options

    def run(self, **more: Any) -> mx.array:
        """The products [pairs, 1, n]."""
        weights, options = self.stored()
        return mlx_marlin.gather_qmm(
            self.x,
            *weights,
            lhs_indices=mx.array(self.sources, mx.uint32),
            rhs_indices=mx.array(self.chosen),
            **options,
            **more,
        )


@st.composite
def calls(draw: st.DrawFn) -> Call:
    (mode, bits, group_size), layout, dtype = draw(st.sampled_from(INSTANCES))
    if profile() != "quick":
        dtype = draw(st.sampled_from([*LIMITS]))
    experts = draw(st.integers(1, 6))
    chosen = draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=90))
    step = format_of(mode, bits).k_multiple(group_size)
    return Call(
        form=(mode, bits, group_size),
        layout=layout,
        experts=experts,
        n=draw(st.sampled_from([8, 32, 41, 70])),
        k=step * draw(st.integers(1, 256 // step)),
        rows=draw(st.integers(1, 12)),
        chosen=sorted(chosen) if draw(st.booleans()) else chosen,
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
    )


OF_EXPERTS = {field.name for field in fields(Gather)}


def kind(**changes: Any) -> Request:
    given: dict[str, Any] = {
        "x_shape": (5, 1, 1, K),
        "x_dtype": mx.float16,
        "shape": (5, 2, 1, 40),
        "dtype": mx.float16,
        "experts": 4,
        "n": 40,
        "k": K,
        "scale_dtype": mx.float16,
        "pairs": (5, 2),
        "rows_are_named": False,
        "transpose": True,
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "layout": "mlx",
        "invariant": False,
        "on_cpu": True,
    } | changes
    experts = Gather(**{name: given.pop(name) for name in OF_EXPERTS & given.keys()})
    return Request(**given, experts=experts)
