"""Known answers of operations that a GPU may lack or compute otherwise.

An 8x8 product whose operands have the types of a form of codes: all lanes and elements
are compared exactly. Significands are odd and exponents beyond those of a half, so that
a number that is truncated, rounded, flushed or converted to another type gives another
product. A tensor operation: its products, and what its queries state. The layout of
operands in a simdgroup is that of M5 (docs/m5.md); other GPUs may have another one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.launch import Launch, Output, TemplateValue, inputs_of
from mlx_marlin.backends.metal import source
from mlx_marlin.backends.metal.kernel_limits import OPERANDS
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH

PAIRS = {"bfloat": "bfloat by bfloat", "half_by_float": "half by float"}
"""The types of operands of forms that are probed."""


def probe(operand: CodeForm) -> Probe:
    """Returns the probe of a form of codes, one of `kernel_limits.PROBED`."""
    text = source.kernel_source("operand_probe")
    launch = Launch(
        source=text,
        template=(("OPERAND", OPERANDS.index(operand)),),
        inputs=inputs_of(text, {"unused": "float32"}),
        grid=(FRAGMENT * SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=(Output("out", "float32", (FRAGMENT**3,), None),),
    )
    return Probe(launch=launch, fault=partial(_fault, operand))


def _fault(operand: CodeForm, values: Sequence[float]) -> str | None:
    indices = product(range(FRAGMENT), repeat=3)
    for (k, n, m), expected, value in zip(
        indices, products(operand), values, strict=True
    ):
        if value != expected:
            return (
                f"the product of {PAIRS[operand]} gives {value:g} for n={n}, k={k}, "
                f"m={m}, expected {expected:g}"
            )
    return None


def products(operand: CodeForm) -> Iterator[float]:
    """Yields the known products, by k, row of w and row of x."""
    for k, n, m in product(range(FRAGMENT), repeat=3):
        odd = 2 * (FRAGMENT * n + k) + 1
        code = 16 + odd / 8 if operand == "bfloat" else 256 + odd / 4
        significand = 128 + 2 * (FRAGMENT * k + m) + 1
        yield code * significand * 2.0 ** (25 * k - 107)


ROWS, COLUMNS, DEPTH = 32, 16, 32
"""Rows of w, rows of x, and k of an operation."""
BASE = 10000
"""What an accumulating operation adds to: BASE + COLUMNS * n + m."""
ELEMENTS = {"w": 32, "x": 16, "result": 16}
"""Elements of a lane, by operand."""


def probes(plan: MetalPlan) -> Sequence[Probe]:
    """Returns the probes of the kernel of a plan, which has tensor operations."""
    dtype = plan.problem.dtype
    return (
        layout_probe(dtype),
        _product_probe(dtype, False),
        _product_probe(dtype, True),
    )


def layout_probe(dtype: str) -> Probe:
    """Returns the probe that asks operands for the indices of their elements."""
    values = sum(1 + 3 * count for count in ELEMENTS.values())
    template = (("T", dtype),)
    output = Output("out", "int32", (SIMD_WIDTH * values,), None)
    return Probe(
        launch=_launch("tensor_layout", template, 1, output), fault=layout_fault
    )


def layout_fault(values: Sequence[float]) -> str | None:
    """Returns which operand has another layout than M5's, or None."""
    # Indices of x may be those of the array or, in all lanes, of its transpose.
    faults = [_difference(values, transposed) for transposed in (False, True)]
    return None if None in faults else faults[0]


def _difference(values: Sequence[float], transposed: bool) -> str | None:
    size = len(values) // SIMD_WIDTH
    for lane in range(SIMD_WIDTH):
        at = lane * size
        for name, count in ELEMENTS.items():
            stated = [int(value) for value in values[at : at + 1 + 3 * count]]
            at += 1 + 3 * count
            known = _layout(name, lane, transposed and name == "x")
            if stated != known:
                return (
                    f"tensor operations have another layout of {name}: lane {lane} "
                    f"has {stated[:7]}..., expected {known[:7]}..."
                )
    return None


def position(name: str, lane: int, element: int) -> tuple[int, int]:
    """Returns the (row, column) of a lane's element in memory, on M5.

    `name`: the operand: "w" [n, k], "x" [m, k] or "result" [n, m].
    """
    quad = lane >> 2
    row = (quad & 4) | (lane >> 1 & 3)
    column = 4 * ((quad & 2) | (lane & 1))
    part, inside = divmod(element, 8)
    row, column = row + 8 * (inside // 4), column + inside % 4
    if name == "w":
        return row + 16 * (part // 2), column + 16 * (part % 2)
    return (row, column + 16 * part) if name == "x" else (row + 16 * part, column)


def _layout(name: str, lane: int, transposed: bool) -> list[int]:
    stated = [ELEMENTS[name]]
    for element in range(ELEMENTS[name]):
        row, column = position(name, lane, element)
        stated += [1, row, column] if transposed else [1, column, row]
    return stated


def _product_probe(dtype: str, add: bool) -> Probe:
    template = (("ADD", add), ("T", dtype))
    output = Output("out", "float32", (DEPTH * ROWS * COLUMNS,), None)
    return Probe(
        launch=_launch("tensor_probe", template, DEPTH, output),
        fault=partial(_product_fault, add),
    )


def _launch(
    name: str,
    template: tuple[tuple[str, TemplateValue], ...],
    threadgroups: int,
    output: Output,
) -> Launch:
    text = source.kernel_source(name)
    return Launch(
        source=text,
        template=template,
        inputs=inputs_of(text, {"unused": "float32"}),
        grid=(threadgroups * SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        outputs=(output,),
    )


def _product_fault(add: bool, values: Sequence[float]) -> str | None:
    for (k, n, m), expected, value in zip(
        product(range(DEPTH), range(ROWS), range(COLUMNS)),
        _products(add),
        values,
        strict=True,
    ):
        if value != expected:
            mode = "accumulating " if add else ""
            return (
                f"the {mode}tensor operation gives {value:g} for n={n}, k={k}, m={m}, "
                f"expected {expected}"
            )
    return None


def _products(add: bool) -> Iterator[int]:
    for k, n, m in product(range(DEPTH), range(ROWS), range(COLUMNS)):
        x = (1 + m + COLUMNS * (k % 16)) * (1 if k < 16 else -1)
        yield (n + 1) * x + add * (BASE + COLUMNS * n + m)
