"""CUDA kernels on the emulator: what stands for `mx.fast.cuda_kernel` without a GPU.

The text is compiled as it is, but for one file: `cuda_host/instructions.cuh` takes the
place of that of the shaders, whose functions are single instructions. CUDA's headers
are those of `cuda_host/`. A block is one of the emulator's threadgroups, a warp one of
its simdgroups, and shared memory is threadgroup memory: so the emulator finds races,
reads of what was never written, accesses out of bounds and misaligned ones here too.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import metal_kernel
from mlx_marlin import cache
from mlx_marlin.backends import graph
from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products import dispatch
from support import cuda_cases, drawn_arrays, format_cases, oracles, orders
from support.cuda_cases import Case
from support.cuda_products import Product
from support.format_cases import Weight

HOST = Path(__file__).parent / "cuda_host"
_INCLUDE = re.compile(r'#include [<"](?P<file>[^>"]+)[>"]')
_SHARED = re.compile(r"extern __shared__ (?P<type>\w+) (?P<name>\w+)\[\];")
BYTES = {"float": 4}
SHARED_LIMIT = 32 * 1024
"""Bytes of threadgroup memory that the emulator gives, as Metal does."""
MOST_ALONG = 4
"""Warps along k where a way of dividing the work names none."""

Changes = dict[str, Callable[[str], str]]
"""By a file's name, what changes its text: planted bugs."""


def flattened(text: str, own: Path, changes: Changes) -> Iterator[str]:
    """Yields the lines of a text, included files in their place."""
    for number, line in enumerate(text.splitlines(), start=1):
        found = _INCLUDE.fullmatch(line)
        if not found:
            yield line
            continue
        name = found["file"]
        path = HOST / Path(name).name
        path = path if path.exists() else own.parent / name
        content = path.read_text(encoding="ascii")
        if path.name in changes:
            content = changes[path.name](content)
        yield _line(1, path)
        yield from flattened(content, path, changes)
        yield _line(number + 1, own)


def _line(number: int, file: Path) -> str:
    return f'#line {number} "{file.parent.name}/{file.name}"'


def _written(text: str) -> Path:
    """Returns a file of a text: raw C++, which no one is to take for Metal."""
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.h"
    return cache.find("cuda_host", name) or cache.write(
        cache.folder("cuda_host"), name, text.encode()
    )


def cuda_kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    header: str,
    source: str,
    shared_memory: int,
    changes: Changes | None = None,
) -> Callable[..., list[mx.array]]:
    """Makes a kernel as `mx.fast.cuda_kernel` does, but on the CPU."""
    text = "\n".join(flattened(header, Path("header"), changes or {}))
    body = _SHARED.sub(
        lambda found: (
            f"threadgroup {found['type']} {found['name']}"
            f"[{shared_memory // BYTES[found['type']]}];"
        ),
        source,
    )
    kernel = metal_kernel(
        name, input_names, output_names, body, f'#include "{_written(text)}"\n'
    )

    def call(
        *, grid: tuple[int, int, int], threadgroup: tuple[int, int, int], **rest: Any
    ) -> list[mx.array]:
        # MLX rounds CUDA's grid up to whole blocks.
        whole = [-(-a // b) * b for a, b in zip(grid, threadgroup, strict=True)]
        return kernel(grid=tuple(whole), threadgroup=threadgroup, **rest)

    return call


def serve(monkeypatch: pytest.MonkeyPatch, changes: Changes | None = None) -> None:
    """Makes a machine whose CUDA kernels run on the CPU, for a forced back end.

    Normalized rows have as much memory there as small ones need.
    """
    monkeypatch.setattr(limits, "NORMED_BYTES", 16 * 1024)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    kernel = partial(cuda_kernel, changes=changes)
    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    # The emulator computes at once and cannot be traced.
    monkeypatch.setattr(dispatch, "traced", lambda run, _: run)


def plan_of(case: Case, **more: Any) -> Plan:
    """Returns a plan with as many warps along k as the emulator has memory for."""
    *format, way = case
    for fields in _smaller(way):
        plan = cuda_cases.plan_of((*format, way | fields), **more)
        if plan.threadgroup_bytes <= SHARED_LIMIT:
            break
    return plan


def _smaller(way: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yields what a way's block could have instead, from most to least."""
    for along in range(way.get("simdgroups_k", MOST_ALONG), 0, -1):
        yield {"simdgroups_k": along}
    if way.get("kernel") in cuda_cases.RING_ROWS:
        # Few enough for 48 rows, which then have one slice.
        for along in range(min(way.get("simdgroups_k", 1), 2), 0, -1):
            yield {"simdgroups_k": along, "buffers": 4}
        yield {"simdgroups_k": 1, "buffers": 2}


def run(plan: Plan, x: mx.array, weight: Weight, *finish: mx.array) -> mx.array:
    arrays = format_cases.arguments(weight, plan.problem.layout)
    return graph.product(plan)(x, *arrays, *finish)


def check(case: Case, *, names: Collection[str] = (), **more: Any) -> Plan:
    """Checks a product of drawn arrays, and returns its plan."""
    return check_product(Product(case, **more), names)


def check_product(product: Product, names: Collection[str] = ()) -> Plan:
    """Compares a product with float64, and returns its plan."""
    plan = plan_of(product.case, **product.options)
    product.assert_right(product.run(plan, cuda_cases.moved, names)())
    return plan


def check_order(case: Case) -> None:
    """Checks in which order a product of numbers that cancel is added."""
    plan = plan_of(case)
    problem = plan.problem
    arrays = drawn_arrays.stored(problem, orders.ones(problem))
    y = graph.product(plan)(orders.one_in_each_trip(problem), *arrays)
    orders.assert_promised(y, plan)


def check_infinite(case: Case) -> None:
    """Checks a row of x that ends in an infinity: what pads a weight leaves it one."""
    weight, x = cuda_cases.draw(case)
    x[0, -1] = mx.inf
    y = run(plan_of(case), x, weight)
    with np.errstate(invalid="ignore"):  # times 0 it is no number
        expected = np.inf * weight.decoded[:, -1]
    np.testing.assert_array_equal(oracles.exact(y[0]), expected)
    cuda_cases.assert_right(y[1:], x[1:], weight.decoded, case[4])


def check_decoded(case: Case, transposed: bool) -> None:
    """Checks a weight that is decoded in blocks; of nvfp4 with a global scale."""
    product = Product(case, global_scale=case[0] == "nvfp4")
    ((weight, x),) = product.drawn
    problem = plan_of(case, **product.options).problem
    plan = DequantizePlan(problem=problem, transposed=transposed, chunk=128)
    assert len(plan.chunks) > 1
    matrix = weight.decoded if transposed else weight.decoded.T
    x = x if transposed else mx.random.normal((3, cuda_cases.N)).astype(x.dtype)
    y = graph.dequantized_product(plan)(x, *format_cases.arguments(weight, case[3]))
    cuda_cases.assert_right(y, x, matrix, case[4])
