"""Calls of the kernels of a decoder block, and what they must give in float64."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_marlin.planning.epilogue import Heads
from support import launches
from support.oracles import ROUNDING, SMALLEST, Floats, exact

OF_SUMS = 2.0**-20
"""Relative error of the kernels' float32 sums and functions."""
BASE = 100.0


def drawn(seed: int, dtype: str, *shape: int) -> mx.array:
    """Returns drawn values of a dtype."""
    values = np.random.default_rng(seed).normal(size=shape)
    return mx.array(values).astype(getattr(mx, dtype))


@dataclass(frozen=True, kw_only=True)
class Rotated:
    """Heads of q and k that are rotated, and normalized if `norm`."""

    streams: int  # Streams
    tokens: int  # New tokens of a stream
    heads: int  # Heads of q
    kv_heads: int  # Heads of k
    features: int  # Features of a head
    dtype: str  # Dtype of the heads
    norm: float | None = None  # Epsilon of their norms, or None
    factor: float = 1.0  # Factor of rotated heads
    # Position of the first token: of all streams, or of each
    first: tuple[int, ...] = (7,)

    @property
    def layout(self) -> Heads:
        return Heads(
            heads=self.heads,
            kv_heads=self.kv_heads,
            features=self.features,
            columns=(self.heads + 2 * self.kv_heads) * self.features,
            norm=self.norm,
            factor=self.factor,
        )

    @property
    def freqs(self) -> mx.array:
        powers = np.arange(0, self.features, 2) / self.features
        return mx.array((BASE**powers).astype(np.float32))

    def arrays(self) -> tuple[mx.array, ...]:
        """Product, positions, frequencies, and the weights of norms."""
        qkv = drawn(1, self.dtype, self.streams, self.tokens, self.layout.columns)
        norms = [drawn(seed, self.dtype, self.features) for seed in (2, 3)]
        given = qkv, mx.array(self.first, mx.int32), self.freqs
        return (*given, *(() if self.norm is None else norms))

    def run(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        both = launches.rotate_heads(self.layout, *arrays[:3], arrays[3:])
        mx.eval(both)
        return both

    def expected(self, *arrays: mx.array) -> list[tuple[Floats, Floats]]:
        """Returns q and k, and the size of what is added up for each element."""
        qkv, *others = map(exact, arrays)
        first, freqs, *norms = others
        rows = qkv.reshape(self.streams, self.tokens, -1, self.features)
        tokens = np.arange(self.tokens)
        positions = np.broadcast_to(first, self.streams)[:, None] + tokens
        angles = positions[:, :, None, None] / freqs
        sine, cosine = np.sin(angles), np.cos(angles)
        found = []
        for part in range(2):
            begin, end = ((0, self.heads), (self.heads, self.heads + self.kv_heads))[
                part
            ]
            own = rows[:, :, begin:end]
            if self.norm is not None:
                square = (own**2).mean(-1, keepdims=True)
                own = own / np.sqrt(square + self.norm) * norms[part]
            x, y = np.split(own * self.factor, 2, axis=-1)
            turned = x * cosine - y * sine, x * sine + y * cosine
            size = (np.abs(x) + np.abs(y)) * (1 + np.abs(angles))
            both = np.concatenate(turned, -1), np.concatenate([size, size], -1)
            found.append(tuple(each.transpose(0, 2, 1, 3) for each in both))
        return found  # type: ignore[return-value]

    def wrong_result(self) -> str | None:
        """Compares both results with float64; each element is rounded once."""
        return _compared(self)


@dataclass(frozen=True, kw_only=True)
class Added:
    """Rows that are added and normalized."""

    rows: int  # Number of rows
    n: int  # Values of a row
    dtype: str  # Dtype of the rows
    epsilon: float = 1e-5  # Epsilon of the norm

    def arrays(self) -> tuple[mx.array, ...]:
        """Both summands and the weight of the norm."""
        rows = [drawn(seed, self.dtype, self.rows, self.n) for seed in (1, 2)]
        return (*rows, drawn(3, self.dtype, self.n))

    def run(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        both = launches.add_norm(*arrays, self.epsilon)
        mx.eval(both)
        return both

    def expected(self, x: mx.array, *others: mx.array) -> list[tuple[Floats, Floats]]:
        """Returns the sum, the norm of the rounded sum, and the size of their terms."""
        y, weight = map(exact, others)
        total = exact(x) + y
        rows = exact(mx.array(total).astype(x.dtype))
        factor = 1 / np.sqrt((rows**2).mean(-1, keepdims=True) + self.epsilon)
        normed = rows * factor * weight
        return [(total, 0 * total), (normed, np.abs(normed))]

    def wrong_result(self) -> str | None:
        """Compares the sum, and the norm of the rounded sum, with float64."""
        return _compared(self)


def _compared(case: Rotated | Added) -> str | None:
    arrays = case.arrays()
    both = zip(case.run(*arrays), case.expected(*arrays), strict=True)
    faults = (_wrong(own, values, size * OF_SUMS) for own, (values, size) in both)
    return next(filter(None, faults), None)


def _wrong(found: mx.array, values: Floats, bound: Any) -> str | None:
    name = str(found.dtype).removeprefix("mlx.core.")
    allowed = bound + 1.01 * ROUNDING[name] * np.abs(values) + SMALLEST[name]
    if found.shape != values.shape:
        return f"shape {found.shape}, expected {values.shape}"
    wrong = ~(np.abs(exact(found) - values) <= allowed)
    return f"{wrong.sum()} of {wrong.size} elements" if wrong.any() else None
