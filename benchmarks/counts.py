"""Counts the main loop of every format, and writes what the cost model reads.

    AGX_HOME=... python -m benchmarks.counts             # every format
    AGX_HOME=... python -m benchmarks.counts "affine 4"  # only these
    python -m benchmarks.counts --table  # registers and slots of a trip, as counted

A kernel that spills, or that the compiler refuses, is an error. See `benchmarks.agx`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import mlx_marlin
from benchmarks import agx
from mlx_marlin.backends.metal.candidates import body_of
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.backends.metal.kernel_limits import BFLOAT_BITS, GEMV_ROWS, MIXED_BITS
from mlx_marlin.backends.metal.launches import launches
from mlx_marlin.backends.metal.main_loop import (
    LARGEST_GROUP,
    MATRIX_OPS,
    format_key,
)
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import FORMATS, TILE_K, Format

FILE = Path(mlx_marlin.__file__).parent / "data" / "counts.json"
SIDE = 4096
"""n and k of the counted products, which are whole tiles."""
SIMDGROUPS_K = 4
MATRIX_ROWS = (FRAGMENT, 2 * FRAGMENT)
"""Rows of products that are counted with one and with two fragments of x."""
MATRIX_SLOTS = 16
"""Slots of an 8x8 product, as the compiler's figures are summed up."""
Counted = tuple[int, int, int]


def formats(only: str = "") -> Iterator[tuple[str, Problem]]:
    """Yields a product of each format to count, of float16, with its name.

    Args:
        only: Only formats whose names begin so.
    """
    for format in FORMATS.values():
        for layout in format.layouts:
            for group in format.group_sizes_in(layout):
                key = format_key(format.codes, format.bits, group, layout)
                if 0 < group <= LARGEST_GROUP and key.startswith(only):
                    yield key, _problem(format, group, layout)


def _problem(format: Format, group: int, layout: str) -> Problem:
    return Problem(
        m=1,
        n=SIDE,
        k=SIDE,
        group_size=group,
        bits=format.bits,
        mode=format.mode,
        dtype="float16",
        scale_dtype=format.scale_dtype("float16"),
        layout=layout,
    )


def forms(problem: Problem) -> Iterator[tuple[CodeForm, str]]:
    """Yields the forms of codes of matrix products, with the dtype of x."""
    if not problem.format.has_offset or problem.group_size == 16:
        yield from forms_of_rows(problem)
        return
    yield "offset", "float16"
    if problem.bits == 4:  # elsewhere the offset is the least one
        yield "least_offset", "float16"
    for dtype in GEMV_ROWS:
        yield "exact", dtype
    if problem.bits <= BFLOAT_BITS:
        yield "bfloat", "bfloat16"
    if problem.bits == MIXED_BITS:
        yield "half_by_float", "bfloat16"


def forms_of_rows(problem: Problem) -> Iterator[tuple[CodeForm, str]]:
    """Yields the forms of codes of dot products, with the dtype of x."""
    exact = not problem.format.has_offset
    for dtype in GEMV_ROWS:
        yield "exact" if exact or dtype == "float32" else "offset", dtype


def count(problem: Problem, m: int, operand: CodeForm, dtype: str) -> Counted:
    """Returns slots besides matrix products, and registers: alive and allocated.

    Args:
        problem: The product.
        m: Rows of x; a multiple of 8 is computed with matrices.
        operand: The form of codes.
        dtype: The dtype of x.

    Raises:
        ValueError: If the compiler refuses the kernel, or spills registers.
    """
    fragments_m = m // FRAGMENT
    scales = problem.format.scale_dtype(dtype)
    problem = replace(problem, m=m, dtype=dtype, scale_dtype=scales)
    kernel = "gemm_register" if fragments_m else "gemv"
    body = body_of(problem, DEFAULT, kernel, fragments_m=fragments_m, operand=operand)
    plan = replace(body, simdgroups_k=SIMDGROUPS_K)
    counts = agx.counts(agx.text_of(launches(plan)[0]), levels=agx.LEVELS[:1])
    if counts.spills:
        raise ValueError(f"{problem.explain()}, {operand}: {counts.spills} spills")
    trips = TILE_K // step_k(problem.group_size)
    matrix = MATRIX_SLOTS * MATRIX_OPS[fragments_m] if fragments_m else 0
    return trips * max(counts.slots) - matrix, counts.alive, counts.registers


def table() -> Iterator[str]:
    """Yields the lines of a table of affine codes in groups of 64: registers, slots."""
    counted = json.loads(FILE.read_text("utf-8"))
    yield "| bits | x | form | rows | MLX's layout | packed |"
    yield "|---|---|---|---|---|---|"
    for bits, kind in product((4, 8), ("rows", "fragments")):
        native, packed = (
            counted[format_key("affine", bits, LARGEST_GROUP, layout)][kind]
            for layout in ("mlx", "marlin")
        )
        for form in native:
            operand, dtype = form.split()
            for index, pair in enumerate(zip(native[form], packed[form], strict=True)):
                rows = index + 1 if kind == "rows" else MATRIX_ROWS[index]
                matrix = MATRIX_SLOTS * MATRIX_OPS.get(rows // FRAGMENT, 0)
                cells = [f"{taken}, {slots + matrix}" for slots, _, taken in pair]
                cells = [str(bits), dtype, f"`{operand}`", str(rows), *cells]
                yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Counts the formats and merges them into the file."""
    if sys.argv[1:] == ["--table"]:
        print("\n".join(table()))
        return
    counted = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for key, problem in formats(*sys.argv[1:]):
        fragments = {
            " ".join(form): [count(problem, m, *form) for m in MATRIX_ROWS]
            for form in forms(problem)
        }
        rows = {
            f"{operand} {dtype}": [
                count(problem, m, operand, dtype)
                for m in range(1, GEMV_ROWS[dtype] + 1)
            ]
            for operand, dtype in forms_of_rows(problem)
        }
        counted[key] = {"fragments": fragments, "rows": rows}
        print(key, *fragments.items(), *rows.items(), flush=True)
        lines = [f"{json.dumps(key)}: {json.dumps(counted[key])}" for key in counted]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
