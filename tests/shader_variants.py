"""Which instances of our kernels there are, and which of them the static check sees."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import mlx.core as mx

from mlx_marlin import device, scheduler, source
from mlx_marlin.emulator import check
from mlx_marlin.formats import DTYPE_BYTES, LAYOUTS
from mlx_marlin.plan import FRAGMENT, FRAGMENTS_M, GEMV_ROWS, MAX_SIMDGROUPS, Plan, Tile
from mlx_marlin.problem import Problem

GROUP_SIZES = (32, 64, 128)
DEMO_SHAPES = ((320, 320), (64, 320), (640, 320), (320, 640), (1024, 320))
"""n, k of the products of the demo's model."""
SHAPES = (
    *DEMO_SHAPES,
    (1, 128),
    (33, 256),
    (2048, 2048),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (128256, 4096),
)
"""n, k: the demo's, tiny and ragged ones, and those of common language models."""
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 33, 64)
"""m: every count of rows that has a kernel of its own, and the borders of the tiles."""
CHIPS = ("Apple M1", "Apple M2 Ultra")


@dataclass(frozen=True)
class Variant:
    """One instance of a kernel.

    Attributes:
        kernel: "gemv", "gemm_register" or "reduce".
        values: Template arguments and dtypes, by name.
    """

    kernel: str
    values: tuple[tuple[str, source.TemplateValue], ...]

    @property
    def source(self) -> source.Source:
        if self.kernel == "reduce":
            return source.reduce_source()
        return source.product_source(self.kernel)

    def call(self) -> dict[str, Any]:
        """Arguments of a call that asks for this instance."""
        values = dict(self.values)
        dtypes = {
            name: getattr(mx, str(values.pop(name)))
            for name in ("x", "scales", "out")
            if name in values
        }
        template = [
            (name, getattr(mx, value) if isinstance(value, str) else value)
            for name, value in values.items()
        ]
        return {
            "inputs": list(_inputs(self.source.input_names, dtypes)),
            "template": template,
            "grid": (32, 1, 1),
            "threadgroup": (32, 1, 1),
            "output_shapes": [(8,)],
            "output_dtypes": [dtypes["out"]],
        }


def _inputs(names: Sequence[str], dtypes: Mapping[str, mx.Dtype]) -> Iterator[mx.array]:
    for name in names:
        if name == "params":
            yield mx.zeros(5, mx.int32)  # fewer than eight: constant memory
        elif name == "w":
            yield mx.zeros(8, mx.uint32)
        elif name == "partials":
            yield mx.zeros(8, mx.float32)
        else:
            yield mx.zeros(8, dtypes["x" if name == "x" else "scales"])


def variants_of(plan: Plan) -> list[Variant]:
    """The instances that a plan launches."""
    problem = plan.problem
    out = "float32" if plan.is_split else problem.dtype
    dtypes = {"x": problem.dtype, "scales": problem.scale_dtype, "out": out}
    values = {**source.product_template(plan), **dtypes}
    found = [Variant(plan.kernel, tuple(values.items()))]
    if plan.is_split:
        values = {**source.reduce_template(plan), "out": problem.dtype}
        found.append(Variant("reduce", tuple(values.items())))
    return found


@cache
def every_variant() -> tuple[Variant, ...]:
    """Every instance that any valid plan has."""
    found: dict[Variant, None] = {}
    for problem in _problems():
        for plan in _plans(problem):
            found.update(dict.fromkeys(variants_of(plan)))
    return tuple(found)


def _problems() -> Iterator[Problem]:
    for dtype, group_size, layout in product(DTYPE_BYTES, GROUP_SIZES, LAYOUTS):
        # MLX promotes x to its scales' dtype: only float32 meets narrower ones.
        for scale_dtype in DTYPE_BYTES if dtype == "float32" else [dtype]:
            yield Problem(
                m=1,
                n=64,
                k=1024,
                group_size=group_size,
                dtype=dtype,
                scale_dtype=scale_dtype,
                layout=layout,
            )


def _plans(problem: Problem) -> Iterator[Plan]:
    """Every valid body, whole and split."""
    bodies = [(0, 1, rows) for rows in range(1, GEMV_ROWS[problem.dtype] + 1)]
    simdgroups = range(1, MAX_SIMDGROUPS + 1)
    bodies += [(f, s, FRAGMENT * f * s) for f in FRAGMENTS_M for s in simdgroups]
    for (fragments_m, simdgroups_m, rows), simdgroups_k in product(bodies, simdgroups):
        if simdgroups_m * simdgroups_k > MAX_SIMDGROUPS:
            continue
        for k_parallel, subtract in product((1, 2), (False, True)):
            yield Plan(
                problem=replace(problem, m=rows),
                kernel="gemm_register" if fragments_m else "gemv",
                tile=Tile(m=rows),
                fragments_m=fragments_m,
                simdgroups_m=simdgroups_m,
                simdgroups_k=simdgroups_k,
                k_parallel=k_parallel,
                num_threadgroups=2,
                subtract=subtract,
            )


@cache
def chosen_variants() -> tuple[Variant, ...]:
    """The instances that the scheduler chooses for the demo and the table of shapes."""
    found: dict[Variant, None] = {}
    chips = [device.DEFAULT, *map(device.Device.named, CHIPS)]
    # The demo's weights, in every dtype and layout that it can be asked for.
    likes = [
        problem
        for problem in _problems()
        if problem.group_size == 64 and problem.scale_dtype == problem.dtype
    ]
    for like, (n, k), m in product(likes, SHAPES, ROWS):
        for chip in chips:
            plan = scheduler.choose(replace(like, m=m, n=n, k=k), chip)
            found.update(dict.fromkeys(variants_of(plan)))
    return tuple(found)


@cache
def covering_variants() -> tuple[Variant, ...]:
    """The chosen instances, and enough others that every two values meet."""
    chosen = chosen_variants()
    return *chosen, *pairwise(every_variant(), chosen)


def checked(variants: Sequence[Variant]) -> frozenset[tuple[str, ...]]:
    """Checks instances of one kernel; returns the operands of their multiplications."""
    text = variants[0].source
    return check(
        text.name,
        text.input_names,
        text.output_names,
        text.source,
        text.header,
        calls=[variant.call() for variant in variants],
    )


Pair = tuple[tuple[str, source.TemplateValue], ...]


def pairwise(variants: Sequence[Variant], given: Sequence[Variant]) -> list[Variant]:
    """Instances that make, with the given ones, every pair of values meet.

    Args:
        variants: To choose from; only pairs that occur in these count.
        given: Instances that are there anyway.
    """
    missing: dict[tuple[str, Pair], list[Variant]] = {}
    for variant in variants:
        for pair in combinations(variant.values, 2):
            missing.setdefault((variant.kernel, pair), []).append(variant)
    for variant in given:
        _cover(missing, variant)
    chosen = []
    draw = random.Random(0)
    while missing:
        candidates = next(iter(missing.values()))
        candidates = draw.sample(candidates, min(len(candidates), 40))
        best = max(candidates, key=lambda variant: _news(missing, variant))
        _cover(missing, best)
        chosen.append(best)
    return chosen


def _news(missing: Mapping[tuple[str, Pair], object], variant: Variant) -> int:
    return sum(
        (variant.kernel, pair) in missing for pair in combinations(variant.values, 2)
    )


def _cover(missing: dict[tuple[str, Pair], list[Variant]], variant: Variant) -> None:
    for pair in combinations(variant.values, 2):
        missing.pop((variant.kernel, pair), None)
