"""Calls that the guard checks: operands, plans of one kernel, warnings."""

import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import planner
from mlx_marlin.backends.devices import named
from mlx_marlin.planning.explicit import STAGED
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import oracles

DEVICE = named("Apple M3 Max", None)

N, K = 70, 256

PRODUCTS = ("gemv", "gemm_register", "gemm_staged", "reduce")
"""Kernels of products; those of experts and of layouts are below."""

SPLIT = {"strategy": "split_k", "k_parallel": 2}


def new_process() -> None:
    """Forgets all that a process remembers, as if another one began."""
    state.reset()


def chosen(kernel: str) -> Callable[[Problem, Any], Plan]:
    """Returns what chooses a plan that launches a kernel, in the scheduler's place."""
    overrides: dict[str, Any] = {
        "gemv": {"kernel": "gemv"},
        "gemm_register": {"kernel": "gemm_register"},
        "gemm_staged": {"kernel": "gemm_staged", "buffers": STAGED[0][0]},
        "reduce": {"kernel": "gemm_register", **SPLIT},
    }

    def choose(problem: Problem, _: Any) -> Plan:
        return planner.make(problem, device=DEVICE, **overrides[kernel])

    return choose


def operands(m: int = 3) -> tuple[mx.array, tuple[mx.array, ...]]:
    w = mx.quantize(mx.random.normal((N, K), key=mx.random.key(1)).astype(mx.float16))
    x = mx.random.normal((m, K), key=mx.random.key(2)).astype(mx.float16)
    return x, w


def is_right(y: mx.array, x: mx.array, w: tuple[mx.array, ...]) -> bool:
    expected = oracles.product(x, *w, group_size=64)
    return oracles.error(y, expected) < oracles.TOLERANCES["float16"]


def collected(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns a result and the warnings of getting it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in found]
