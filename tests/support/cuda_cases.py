"""Cases of the CUDA kernels and what they must give, on a GPU and on the CPU.

Integer cases are compared bit for bit, floats with exactly decoded weights in float64
and with the same product in plain numbers of the same dtype.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.devices import named
from mlx_marlin.planning.epilogue import PLAIN, Epilogue, Rotation
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import k_tile
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles
from support.format_cases import GROUPED, Weight, layouts_of, step_of
from support.oracles import Floats, exact

N, TILES_K = 200, 7
"""Columns that fill no tile, and k tiles that no number of slices divides."""
RING_K = 1216
"""Values of k where x comes in stages: more than there may be, the last one half."""
Case = tuple[str, int, int, str, str, int, dict[str, Any]]
Place = Callable[[mx.array], mx.array]
STREAMS = {"strategy": "stream_k", "minimum": 1}
HYBRID = {"strategy": "hybrid", "minimum": 1, "whole": 2, "simdgroups_n": 1}
"""Of products as small as these, the usual minimum of k tiles leaves no split."""
WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "data_parallel", "simdgroups_n": 2, "simdgroups_k": 3},
    {"strategy": "stripe", "num_threadgroups": 2, "k_parallel": 3, "simdgroups_n": 3},
    {"strategy": "split_k", "k_parallel": 3, "simdgroups_n": 1, "simdgroups_k": 2},
    {**STREAMS, "num_threadgroups": 7, "simdgroups_n": 2, "simdgroups_k": 2},
    HYBRID | {"num_threadgroups": 6},
    {"strategy": "data_parallel", "simdgroups_n": 7, "simdgroups_k": 2},
    {**STREAMS, "num_threadgroups": 40, "simdgroups_n": 1, "simdgroups_k": 1},
)
_RING_WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "data_parallel", "simdgroups_n": 2, "simdgroups_k": 3, "buffers": 12},
    {"strategy": "stripe", "num_threadgroups": 2, "k_parallel": 3, "simdgroups_n": 3},
    {"strategy": "split_k", "k_parallel": 2, "simdgroups_n": 1, "simdgroups_k": 2},
    {**STREAMS, "num_threadgroups": 3, "simdgroups_n": 2, "simdgroups_k": 2},
    HYBRID | {"num_threadgroups": 4, "buffers": 8},
    {"strategy": "data_parallel", "simdgroups_n": 5, "simdgroups_k": 2},
    {**STREAMS, "num_threadgroups": 3, "simdgroups_n": 6},
)


def ring_ways(kernel: str) -> tuple[dict[str, Any], ...]:
    """Returns ways of a kernel with stages of x.

    Where a tile is not cut in three, its stages pass the ring's end.
    """
    shared = {"kernel": kernel, "buffers": 4, "simdgroups_k": 1}
    return tuple(shared | way for way in _RING_WAYS)


WGMMA_WAYS, STAGED_WAYS = ring_ways("wgmma"), ring_ways("mma_staged")
RING_WAYS = (*WGMMA_WAYS, *STAGED_WAYS)
WIDE = {"strategy": "data_parallel", "simdgroups_n": 7, "simdgroups_k": 4}
"""The block of 896 threads that few rows of large weights have."""
STAGED = {"kernel": "mma_staged", "strategy": "data_parallel"}
RING_WIDE = {"kernel": "wgmma", "strategy": "data_parallel", "simdgroups_n": 7}
LARGE: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, WIDE),
    (16, STAGED | {"simdgroups_n": 7, "simdgroups_k": 4, "buffers": 12}),
    (16, STAGED | {"simdgroups_n": 2, "simdgroups_k": 14, "buffers": 28}),
    (32, STAGED | {"simdgroups_n": 5, "simdgroups_k": 4, "buffers": 12}),
    (32, {"strategy": "data_parallel", "simdgroups_n": 8, "simdgroups_k": 2}),
    (48, RING_WIDE | {"simdgroups_k": 1, "buffers": 2}),
    (64, RING_WIDE | {"simdgroups_k": 1, "buffers": 6}),
)
"""Rows and blocks of many threads or much shared memory, as in plans of models."""
ROWS = (1, 9, 17, 32, 8, 33, 16, 25, 30)
RING_ROWS = {
    "wgmma": (9, 24, 30, 48, 64, 16, 17, 33, 70),
    "mma_staged": (1, 16, 24, 30, 8, 9, 32, 17, 40),
}
"""Rows of kernels with stages: of each tile full and ragged ones, and two tiles."""
EPILOGUES = (
    Epilogue(bias=True),
    Epilogue(activation="silu", multiply=True),
    Epilogue(bias=True, activation="gelu", residual=True),
    Epilogue(activation="gelu_approx", multiply=True, residual=True),
    Epilogue(bias=True, parts=(40, 70, 90)),
)


GATED = Epilogue(activation="silu", gated=True)
GATED_N = 192
"""Rows of gate and up together: three packed tiles each, no multiple of two."""
GATED_WAYS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"strategy": "data_parallel", "simdgroups_n": 2, "simdgroups_k": 3}),
    (19, {"strategy": "data_parallel", "simdgroups_n": 4, "simdgroups_k": 2}),
    (9, {"strategy": "data_parallel", "simdgroups_n": 6, "simdgroups_k": 1}),
    (12, STAGED | {"simdgroups_n": 4, "simdgroups_k": 1, "buffers": 4}),
    (19, RING_WIDE | {"simdgroups_n": 2, "simdgroups_k": 1, "buffers": 4}),
    (12, RING_WIDE | {"simdgroups_n": 6, "simdgroups_k": 1, "buffers": 4}),
)
"""Rows and blocks with as many tiles of gate as of up, some more than there are."""
ROTATION = Rotation(features=64, columns=192)
ROTATED_N = 256
"""Two heads of q, one of k and one of v."""
EPSILON = 1e-2
"""Of norms: large enough to be missed."""
HEAD_EPSILON = 4.0
"""Of norms of heads, whose squares are 20 and more."""
NORMED_HEADS = Rotation(64, 192, per_row=True, norm=HEAD_EPSILON, queries=128)
"""The same after norms of q and k, each row at a place of its own."""
NORMED_WAYS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"strategy": "data_parallel", "simdgroups_n": 2, "simdgroups_k": 3}),
    (5, {"strategy": "data_parallel", "simdgroups_n": 7, "simdgroups_k": 2}),
    (8, {"strategy": "data_parallel", "simdgroups_n": 1, "simdgroups_k": 5}),
)
"""Rows that are normalized and blocks with more warps and fewer, shared unevenly."""


def h200() -> CudaDevice:
    device = named("NVIDIA H200")
    assert isinstance(device, CudaDevice)
    return device


def formats() -> Iterator[tuple[str, int, int]]:
    """Yields every format that the kernels know: mode, bits and group size."""
    for mode, bits, group_size in GROUPED:
        k = step_of(mode, bits, group_size)
        problem = Problem(
            m=1,
            n=N,
            k=k,
            mode=mode,
            bits=bits,
            group_size=group_size or k,
            scale_dtype=format_of(mode, bits).scale_dtype("float16"),
            layout="marlin",
        )
        if limits.why_not(problem) is None:
            yield mode, bits, group_size


def cases() -> Iterator[Case]:
    """Yields every format once, and with each the next of all else.

    Of packed weights every third one has each kernel; floats, which have one group size
    only, have two.
    """
    of_mma = zip(cycle(limits.DTYPES), cycle(ROWS), cycle(WAYS), strict=True)
    of_ring = [
        zip(cycle(limits.DTYPES), cycle(rows), cycle(ring_ways(kernel)), strict=True)
        for kernel, rows in RING_ROWS.items()
    ]
    layouts, turns = cycle((0, 0, -1)), cycle((of_mma, *of_ring))
    rings = cycle(of_ring)
    for mode, bits, group_size in formats():
        layout = layouts_of(mode, bits, group_size)[::-1][next(layouts)]
        turn = next(turns) if layout == "marlin" else of_mma
        if mode[:2] in ("mx", "nv"):
            turn = of_mma
            yield mode, bits, group_size, "marlin", *next(next(rings))
        yield mode, bits, group_size, layout, *next(turn)


def covering(cases: Iterable[Case], facts: Callable[[Case], set[object]]) -> list[Case]:
    """Returns few cases that meet every fact: all that chooses another text."""
    known = [*cases]
    chosen = format_cases.covering(range(len(known)), lambda i: facts(known[i]))
    return [known[i] for i in chosen]


def plan_of(
    case: Case,
    *,
    epilogue: Epilogue = PLAIN,
    batch: int = 1,
    global_scale: bool = False,
    n: int = N,
    norm: float | None = None,
    **more: Any,
) -> Plan:
    mode, bits, group_size, layout, dtype, m, way = case
    k = k_of(mode, bits, group_size, way)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        batch=batch,
        mode=mode,
        bits=bits,
        group_size=group_size or k,
        dtype=dtype,
        scale_dtype=format_of(mode, bits).scale_dtype(dtype),
        layout=layout,
        epilogue=epilogue,
        global_scale=global_scale,
        norm=norm,
    )
    overrides = {"kernel": "mma"} | way | more
    plan = planner.make(problem, device=h200(), **overrides)
    assert plan.kernel == overrides["kernel"]
    return plan


def k_of(mode: str, bits: int, group_size: int, way: dict[str, Any]) -> int:
    """Returns a k that fills no pair of tiles, and where groups let it, no tile."""
    step = step_of(mode, bits, group_size)
    if way.get("kernel") in RING_ROWS:
        most = RING_K
    elif group_size == 0:
        return step
    else:
        most = TILES_K * k_tile(group_size)
    return max(most // step, 1) * step - (step if group_size == 32 else 0)


def draw(case: Case, seed: int = 1, n: int = N) -> tuple[Weight, mx.array]:
    mode, bits, group_size, _, dtype, m, way = case
    k = k_of(mode, bits, group_size, way)
    weight = format_cases.any_weight(
        mode, bits, group_size, n, k, dtype=dtype, seed=seed
    )
    x = mx.random.normal((m, k), key=mx.random.key(seed))
    return weight, x.astype(getattr(mx, dtype))


def integers(
    dtype: str, m: int, way: dict[str, Any], n: int = N, *, gated: bool = False
) -> tuple[Weight, mx.array, Floats]:
    """Returns a weight of integers [n, k], x and what their product is stored as."""
    rng = np.random.default_rng(m)
    k = k_of("affine", 4, 64, way)
    codes = rng.integers(0, 16, (n, k))
    ones = np.ones((n, k // 64), np.float32)
    native = [mx.array(each).astype(getattr(mx, dtype)) for each in (ones, -8 * ones)]
    weight = Weight("affine", 4, 64, (format_cases.write_codes(codes, 4), *native))
    x = mx.array(rng.integers(-1, 2, (m, k)).astype(np.float32))
    total = exact(x) @ weight.decoded.T
    total = total[:, : n // 2] * total[:, n // 2 :] if gated else total
    expected = format_cases.rounded(total, dtype)
    return weight, x.astype(getattr(mx, dtype)), expected


def norm_of(x: mx.array) -> mx.array:
    """Returns the weight [k] of a norm, in the dtype of x."""
    drawn = 1 + 0.2 * mx.random.normal(x.shape[-1:], key=mx.random.key(6))
    return drawn.astype(x.dtype)


def normalized(x: mx.array, norm: mx.array, epsilon: float) -> Floats:
    """Returns rows divided by the root of their mean square, times a weight."""
    rows = exact(x)
    squares = np.mean(rows**2, axis=-1, keepdims=True)
    return rows / np.sqrt(squares + epsilon) * exact(norm)


def positions_of(m: int, rotation: Rotation, first: int = -2) -> mx.array:
    """Returns a place for each row, or one for all: some as in a long context.

    Padding on the left has positions below 0.
    """
    rows = m if rotation.per_row else 1
    return mx.array([first + 9000 * i for i in range(rows)], mx.int32)


def freqs_of(rotation: Rotation) -> mx.array:
    powers = np.arange(0, rotation.features, 2) / rotation.features
    return mx.array((10000.0**powers).astype(np.float32))


def norms_of(rotation: Rotation, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Returns the weights of the norms of q and k, if heads have any."""
    if rotation.norm is None:
        return ()
    drawn = mx.random.normal((2, rotation.features), key=mx.random.key(7))
    q, k = (1 + 0.3 * drawn).astype(dtype)
    return q, k


def operands(
    m: int, n: int = N, dtype: mx.Dtype = mx.float16
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns a bias [n], a multiplier [m, n] and a residual [m, n]."""
    keys = mx.random.split(mx.random.key(5), 3)
    shapes = ((n,), (m, n), (m, n))
    drawn = [mx.random.normal(s, key=k) for s, k in zip(shapes, keys, strict=True)]
    bias, multiplier, residual = (each.astype(dtype) for each in drawn)
    return bias, multiplier, residual


def as_it_is(array: mx.array) -> mx.array:
    return array


def moved(array: mx.array) -> mx.array:
    """Returns an array that begins an element after its buffer does."""
    longer = mx.concatenate([array.flatten()[:1], array.flatten()])
    mx.eval(longer)
    return longer[1:].reshape(array.shape)


def assert_right(y: mx.array, x: mx.array, weight: Floats, dtype: str) -> None:
    expected = exact(x) @ weight.T
    assert y.shape == expected.shape
    off = oracles.error(y, expected)
    assert off < oracles.TOLERANCES[dtype]
    plain = mx.array(weight.astype(np.float32)).astype(x.dtype)
    if expected.size >= oracles.MANY:
        assert off <= 2 * oracles.error(x @ plain.T, expected)
