"""Calls that the guard checks: operands, plans of one kernel, warnings."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from mlx_marlin import state, warn_once
from mlx_marlin.backends import kernels, planner
from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import source
from mlx_marlin.guard import verdicts
from mlx_marlin.guard.verdicts import Verdict
from mlx_marlin.planning.explicit import STAGED
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import FORMATS
from support import oracles

DEVICE = named("Apple M3 Max", None)

N, K = 70, 256

PRODUCTS = ("gemv", "gemm_register", "gemm_staged", "reduce")
"""Kernels of products; those of experts and of layouts are below."""

SPLIT = {"strategy": "split_k", "k_parallel": 2}


def new_process() -> None:
    """Forgets all that a process remembers, as if another one began."""
    state.reset()
    warn_once.forget()


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


def change_header(patch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """Changes a kernel's text as a GPU might, and that of no other kernel."""
    right = source.kernel_source

    def changed(asked: str, atomic: bool = False) -> Any:
        text = right(asked, atomic)
        if asked != name:
            return text
        assert old in text.header
        return replace(text, header=text.header.replace(old, new))

    patch.setattr(source, "kernel_source", changed)


def check_statically(probe: Probe) -> None:
    """Puts the kernel of a probe to the static check."""
    launch, text = probe.launch, probe.launch.source
    (output,) = launch.outputs
    call = {
        "inputs": [mx.zeros(1)],
        "output_shapes": [output.shape],
        "output_dtypes": [getattr(mx, output.dtype)],
        "template": kernels.template(launch.template),
        "grid": launch.grid,
        "threadgroup": launch.threadgroup,
    }
    names = text.name, text.input_names, text.output_names
    metal_emulator.check(*names, text.source, text.header, calls=[call])


def assert_compares(
    probe: Probe, values: list[float], near: Callable[[float], float], at: Iterable[int]
) -> None:
    """Asserts that a probe finds each wrong value: a near one, its negative and NaN."""
    assert probe.fault(values) is None
    for each in at:
        right = values[each]
        for wrong in (near(right), -right, float("nan")):
            values[each] = wrong
            assert probe.fault(values) is not None
        values[each] = right


def verdict(**changed: Any) -> Verdict:
    """Returns a verdict, which is that a kernel has passed."""
    fields = ("kernels", "fault", "example", "date", "shaders")
    given = {**dict.fromkeys(fields, "k"), "version": verdicts.version()}
    return Verdict(**given | {"state": "passed"} | changed)


LARGE = 4096
"""Features of a whole row that is one group."""


def formats() -> list[dict[str, Any]]:
    """Returns every format in every layout and group size, 4096 for a whole row."""
    return [
        {
            "mode": each.mode,
            "bits": each.bits,
            "group_size": size or LARGE,
            "layout": lay,
        }
        for each in FORMATS.values()
        for lay in each.layouts
        for size in each.group_sizes_in(lay)
    ]


def of_experts(
    problem: Problem, experts: int, gate: str | None = None, bias: bool = False
) -> GatherProblem:
    """Returns the problem of two experts for each row."""
    return GatherProblem(
        problem=problem, experts=experts, pairs_per_row=2, gate=gate, bias=bias
    )


NATIVE = [form for form in formats() if form["layout"] == "mlx"]
"""The formats in MLX's layout."""
