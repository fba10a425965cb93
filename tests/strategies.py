"""What the tests draw: problems, devices and plans, small and ragged sizes often."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import mlx.core as mx
from hypothesis import strategies as st

from mlx_marlin import device, launch
from mlx_marlin.device import Device
from mlx_marlin.formats import DTYPE_BYTES, LAYOUTS
from mlx_marlin.plan import (
    FRAGMENT,
    FRAGMENTS_M,
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    PARTITIONS,
    Plan,
    Tile,
)
from mlx_marlin.problem import Problem

EDGES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)
"""Sizes around the borders of fragments and tiles."""

DTYPES = st.sampled_from([*DTYPE_BYTES])
ANY_LAYOUT = st.sampled_from(LAYOUTS)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Draws 1 to `most`, often beside the border of a fragment or tile."""
    edges = [edge for edge in EDGES if edge <= most]
    return st.sampled_from(edges) | st.integers(1, most)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_m: int = 70,
    max_n: int = 200,
    max_k: int = 2048,
    dtypes: st.SearchStrategy[str] = DTYPES,
    layouts: st.SearchStrategy[str] = ANY_LAYOUT,
) -> Problem:
    """Draws a problem; `max_k` is at least 128, the largest group."""
    group_size = draw(st.sampled_from([32, 64, 128]))
    dtype = draw(dtypes)
    return Problem(
        m=draw(sizes(max_m)),
        n=draw(sizes(max_n)),
        k=group_size * draw(sizes(max_k // group_size)),
        group_size=group_size,
        dtype=dtype,
        # MLX promotes x to its scales' dtype: only float32 meets narrower ones.
        scale_dtype=draw(DTYPES) if dtype == "float32" else dtype,
        layout=draw(layouts),
    )


KNOWN_DEVICES: tuple[Device, ...] = tuple(
    variant for variants in device.chips().values() for variant in variants
)
"""Every chip of the table."""


def devices() -> st.SearchStrategy[Device]:
    """Draws a known chip, the default, or one that nobody has built yet."""
    imagined = st.builds(
        Device,
        name=st.just("imagined"),
        variant=st.just("imagined"),
        generation=st.sampled_from(["unknown", "M1", "M3", "M5", "M9"]),
        tier=st.just("unknown"),
        cores=st.integers(1, 200),
        bandwidth_gbs=st.floats(10, 2000),
        clock_ghz=st.floats(0.5, 4),
    )
    return st.sampled_from((*KNOWN_DEVICES, device.DEFAULT)) | imagined


@st.composite
def plans(draw: st.DrawFn, *, of: st.SearchStrategy[Problem] | None = None) -> Plan:
    """Draws any valid plan of a problem, sensible or not.

    Args:
        draw: From Hypothesis.
        of: Draws the problem.
    """
    problem = draw(problems() if of is None else of)
    fragments_m, simdgroups_m = draw(_rows(problem))
    rows = FRAGMENT * fragments_m * simdgroups_m if fragments_m else problem.m
    whole = Plan(
        problem=problem,
        kernel="gemm_register" if fragments_m else "gemv",
        tile=Tile(m=rows),
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=draw(st.integers(1, MAX_SIMDGROUPS // simdgroups_m)),
        strategy="data_parallel",
        num_threadgroups=-(-problem.m // rows) * -(-problem.n // 32),
        subtract=draw(st.booleans()),
    )
    return draw(st.just(whole) | _stripes(whole))


def _rows(problem: Problem) -> st.SearchStrategy[tuple[int, int]]:
    """Draws (fragments_m, simdgroups_m); no fragments means gemv."""
    matrices = st.tuples(st.sampled_from(FRAGMENTS_M), st.integers(1, MAX_SIMDGROUPS))
    if problem.m > GEMV_ROWS[problem.dtype]:
        return matrices
    return st.just((0, 1)) | matrices


@st.composite
def _stripes(draw: st.DrawFn, whole: Plan) -> Plan:
    """Draws a stripe plan with the body of a data-parallel one."""
    k_parallel = draw(st.integers(1, whole.cuts))
    units = whole.units * k_parallel
    # Also more threadgroups than units: the rest must idle.
    threadgroups = st.integers(1, 2 * units + 3) | st.just(units)
    return replace(
        whole,
        strategy="stripe",
        partition=draw(st.sampled_from(PARTITIONS)),
        k_parallel=k_parallel,
        num_threadgroups=draw(threadgroups),
    )


Native = tuple[mx.array, mx.array, mx.array]
"""Codes, scales and biases in MLX's layout."""
Case = tuple[Plan, mx.array, Native]
"""A plan, activations, and the weight in MLX's layout."""


def arrays(problem: Problem, *, seed: int) -> tuple[mx.array, Native]:
    """Makes activations and a quantized weight for a problem.

    Groups of every kind occur: ordinary, constant (MLX's scale is then -1e-7) and of
    one sign; about half of MLX's scales are negative.
    """
    key = mx.random.key(seed)
    dtype = getattr(mx, problem.dtype)
    x = mx.random.normal((problem.m, problem.k), key=key).astype(dtype)
    keys = mx.random.split(key, 2)
    w = mx.random.normal((problem.n, problem.k), key=keys[0]) * 0.05
    groups = w.reshape(problem.n, -1, problem.group_size)
    kind = mx.random.randint(0, 8, groups.shape[:2], key=keys[1])[..., None]
    groups = mx.where(kind == 0, 0.125, mx.where(kind == 1, mx.abs(groups), groups))
    weight = groups.reshape(w.shape).astype(getattr(mx, problem.scale_dtype))
    native = mx.quantize(weight, group_size=problem.group_size, bits=problem.bits)
    mx.eval(x, native)
    return x, (native[0], native[1], native[2])


def runnable_plans(
    *, max_k: int = 512, dtypes: st.SearchStrategy[str] = DTYPES
) -> st.SearchStrategy[Plan]:
    """Draws plans small enough to run by the hundred."""
    return plans(of=problems(max_m=70, max_n=100, max_k=max_k, dtypes=dtypes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a plan and the arrays to run it on."""
    plan = draw(runnable_plans())
    x, native = arrays(plan.problem, seed=draw(st.integers(0, 2**16)))
    return plan, x, native


def another_schedule(seed: int) -> AbstractContextManager[None]:
    """Makes the emulator run threadgroups in another order; elsewhere does nothing."""
    if launch.backend() != "emulator":
        return nullcontext()
    from mlx_marlin import emulator

    return emulator.emulated(seed=seed, workers=1 + seed % 3)
