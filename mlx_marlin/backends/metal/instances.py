"""Enumeration of all kernel instances that plans without overrides use.

An instance is a kernel with template arguments. The arguments of an epilogue (`BIAS`,
`ACTIVATION`, `MULTIPLY`, `RESIDUAL`, `PARTS`) are omitted; they combine with every
instance that writes a result.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from mlx_marlin.backends.launch import TemplateValue
from mlx_marlin.backends.metal import launches, source
from mlx_marlin.backends.metal.candidates import SIMDGROUPS_K, most_rows
from mlx_marlin.backends.metal.cost import SIMDGROUPS_TO_FILL
from mlx_marlin.backends.metal.kernel_limits import (
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
    TENSOR_FRAGMENTS_M,
    TENSOR_KERNEL,
    THREE_FRAGMENTS_M,
    forms,
    product_registers,
)
from mlx_marlin.backends.metal.plan import MetalPlan, tensor_reason
from mlx_marlin.planning.explicit import STAGED, CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import WIDTHS, data_parallel
from mlx_marlin.planning.work.tiles import FRAGMENT, Kernel, Tile, k_tile
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import (
    CHANNEL,
    DTYPE_BYTES,
    FORMATS,
    TILE_N,
    Format,
)

FEWEST_REGISTERS = 96
"""The least `Core.thread_registers`: there plans have one fragment instead of two."""
K = 1024
"""Columns of the enumerated weights: enough for every number of simdgroups along k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An instance of a kernel that computes products."""

    # The smallest plan that uses the instance; it also has the format
    plan: MetalPlan = field(repr=False)
    name: str  # Name of the kernel in MLX
    template: tuple[tuple[str, TemplateValue], ...]  # Template arguments

    @property
    def is_experiment(self) -> bool:
        """Whether the model never chooses a plan with the instance."""
        three = self.plan.fragments_m == THREE_FRAGMENTS_M
        return three or self.plan.kernel == "gemm_staged"


def variants(
    *,
    mode: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    experiments: bool = False,
) -> Iterator[Variant]:
    """Yields every kernel instance of products once, for all or for given formats.

    Args:
        mode: Only this quantization mode.
        bits: Only codes with this number of bits.
        group_size: Only groups of this size; 0 is a whole row.
        dtype: Only activations of this dtype.
        layout: Only weights in this layout, "mlx" or "marlin".
        experiments: Whether those that only a race tries are among them.
    """
    filters = (mode, bits, group_size, dtype, layout)
    for format, x_dtype in product(FORMATS.values(), DTYPE_BYTES):
        for stored in format.layouts:
            for size in format.group_sizes_in(stored):
                values = (format.mode, format.bits, size, x_dtype, stored)
                pairs = zip(filters, values, strict=True)
                if all(filter_ in (None, value) for filter_, value in pairs):
                    for variant in _of_format(format, size, x_dtype, stored):
                        if experiments or not variant.is_experiment:
                            yield variant


def _of_format(
    format: Format, group_size: int, dtype: str, layout: str
) -> Iterator[Variant]:
    problem = Problem(
        m=1,
        n=2 * TILE_N,
        k=K,
        group_size=K if group_size == CHANNEL else group_size,
        bits=format.bits,
        mode=format.mode,
        dtype=dtype,
        scale_dtype=format.scale_dtype(dtype),
        layout=layout,
    )
    ragged = replace(problem, n=2 * TILE_N - 1)
    batched = replace(problem, batch=2)
    both = replace(ragged, batch=2)
    found: dict[tuple[object, ...], Variant] = {}
    for shape in (problem, ragged, batched, both):
        for body in _bodies(shape):
            for plan in _divisions(body):
                variant = variant_of(plan)
                found.setdefault((variant.name, variant.template), variant)
    yield from found.values()


def variant_of(plan: MetalPlan) -> Variant:
    """Returns the instance that a plan uses, without its epilogue."""
    text = source.kernel_source(plan.kernel)
    template = launches.product_template(plan)
    return Variant(plan=plan, name=text.name, template=(*template.items(),))


def _bodies(problem: Problem) -> Iterator[MetalPlan]:
    """Yields every shape of threadgroup, as its data-parallel plan."""
    for rows, count in product(range(1, GEMV_ROWS[problem.dtype] + 1), SIMDGROUPS_K):
        yield _body(problem, "gemv", 0, 1, count, rows)
    sides = range(1, MAX_SIMDGROUPS_M + 1)
    groups = [(1, 1), *((2, side) for side in sides)]
    if problem.dtype != "float32":
        groups.append((THREE_FRAGMENTS_M, 1))
    if any(_is_large(problem, form) for form in forms(problem, 2)):
        groups += [(1, side) for side in sides if side > 1]
    for (fragments_m, simdgroups_m), count in product(groups, SIMDGROUPS_K):
        rows = FRAGMENT * fragments_m * simdgroups_m
        shared = fragments_m, simdgroups_m, count, rows
        if simdgroups_m * count <= MAX_SIMDGROUPS:
            for form in forms(problem, fragments_m):
                yield _body(problem, "gemm_register", *shared, operand=form)
        is_staged = problem.batch == 1 and fragments_m != THREE_FRAGMENTS_M
        for buffers, loaders in STAGED if is_staged else ():
            most = most_rows(problem, buffers)
            # Staging pays only if several simdgroups share decoded weights, unless
            # memory has no room for them.
            if rows > most or (simdgroups_m == 1 and most >= 4 * FRAGMENT):
                continue
            if (simdgroups_m * count + loaders) <= MAX_SIMDGROUPS:
                yield from _fitting(problem, shared, buffers, loaders)
    if tensor_reason(problem) is None:
        yield from _tensor_bodies(problem)


def _is_large(problem: Problem, operand: CodeForm) -> bool:
    """Returns whether some chips have no registers for two fragments."""
    return product_registers(problem, 2, operand) > FEWEST_REGISTERS


def _tensor_bodies(problem: Problem) -> Iterator[MetalPlan]:
    """Yields the threadgroups of `gemm_tensor`: few along k only if k is short."""
    one, two = TENSOR_FRAGMENTS_M
    sides = [(two, 1), *((one, side) for side in range(1, MAX_SIMDGROUPS_M + 1))]
    for (fragments_m, side), count in product(sides, SIMDGROUPS_K):
        rows = FRAGMENT * fragments_m * side
        if side * count <= MAX_SIMDGROUPS:
            yield _body(problem, TENSOR_KERNEL, fragments_m, side, count, rows)


def _fitting(
    problem: Problem, shared: tuple[int, int, int, int], buffers: int, loaders: int
) -> Iterator[MetalPlan]:
    """Yields the plan of a `gemm_staged` threadgroup if its memory fits."""
    with suppress(ValueError):
        yield _body(problem, "gemm_staged", *shared, buffers=buffers, loaders=loaders)


def _body(
    problem: Problem,
    kernel: Kernel,
    fragments_m: int,
    simdgroups_m: int,
    simdgroups_k: int,
    rows: int,
    *,
    operand: CodeForm | None = None,
    buffers: int = 0,
    loaders: int = 0,
) -> MetalPlan:
    tile = Tile(m=rows, k=k_tile(problem.group_size))
    return MetalPlan(
        problem=replace(problem, m=rows),
        kernel=kernel,
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        work=data_parallel(2 * problem.batch, problem.k // tile.k),
        operand=operand or forms(problem, fragments_m, kernel)[0],
        buffers=buffers,
        loaders=loaders,
    )


def _divisions(body: MetalPlan) -> Iterator[MetalPlan]:
    """Yields a plan with whole tiles, with ranges, and with wide tiles."""
    yield body
    work = body.work
    ranges = Work(
        strategy="stripe", tiles=work.tiles, k_tiles=work.k_tiles, threadgroups=1
    )
    yield replace(body, work=ranges)
    if body.problem.batch > 1 or body.has_tensor_operations:
        return
    rest = body.problem.n % TILE_N - TILE_N if body.problem.n % TILE_N else 0
    for width in WIDTHS:
        # Cores have two threadgroups or more, so half as many simdgroups suffice.
        least = max(SIMDGROUPS_TO_FILL // 2, body.simdgroups_m * width)
        few = body.simdgroups_m * body.simdgroups_k <= least
        if body.simdgroups_k % width == 0 and few:
            wide = replace(work, strategy="hytis", whole=1)
            problem = replace(body.problem, n=TILE_N * (width + 1) + rest)
            yield replace(body, problem=problem, work=wide, simdgroups_n=width)
