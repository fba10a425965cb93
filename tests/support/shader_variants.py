"""Which instances of our kernels there are, and which of them the static check sees."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_emulator import check
from mlx_marlin.backends import build, planner, source
from mlx_marlin.backends.metal import device
from mlx_marlin.backends.metal import launches as metal_arguments
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.candidates import SIMDGROUPS_K
from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    MAX_SIMDGROUPS_M,
    NORM_ROWS,
    TENSOR_FRAGMENTS_M,
    THREE_FRAGMENTS_M,
)
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.source import TENSOR_HEADER
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import GATES, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import WIDTHS, data_parallel
from mlx_marlin.planning.work.tiles import FRAGMENT, Kernel, Reduction, Tile, k_tile
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import CHANNEL, DTYPE_BYTES, FORMATS, TILE_N, Format
from mlx_marlin.weights.formats import WIDTHS as WIDTHS_OF_CODES
from support import format_cases, strategies

DEMO_SHAPES = ((320, 320), (64, 320), (640, 320), (320, 640), (1024, 320))
"""n, k of the products of the demo's model."""
SHAPES = (*DEMO_SHAPES, (1, 128), (33, 256), (128256, 4096))
"""n, k: the demo's, tiny and ragged ones, and that of a vocabulary."""
ROWS = (1, 3, 5, 8, 16, 32, 64)
"""m: few rows, and tiles of every size."""
EPILOGUE_ARGUMENTS = ("T", "BIAS", "ACTIVATION", "MULTIPLY", "RESIDUAL", "PARTS")
"""Values that meet those of the main loop nowhere but where a tile is stored."""
WEIGHT = ("MODE", "BITS", "GROUP", "PACKED", "scales")
"""Values that meet in functions which all kernels share: in the products' they do."""
SHARING = ("gemv", "gather", "dequantize", "gemm_staged", "gemm_tensor")
"""Kernels that read weights with functions of `gemm_register`, where the pairs meet."""
PLACES = ("LOW_ROW", "LOW_K", "HIGH_ROW", "HIGH_K")
"""Numbers that say where the bits of codes go: all alike to a compiler."""
STORING = ("kind", "TILES_N", "out")
"""Those that they meet there."""
NORMED = {"plain": "normed", "fused": "normed", "gated": "normed gated"}
"""Kinds of kernels without a norm -> those with one."""
STAGING = ((1, 0), (2, 0), (2, 1), (3, 0), (3, 2))
"""Buffers and loaders of `gemm_staged`."""
STAGED_SIMDGROUPS = (1, 2, 4)
"""Its simdgroups along m, and along k: enough for every way to share a stage."""
EPILOGUES = (
    *(
        Epilogue(bias=bias, activation=activation, multiply=multiply, residual=residual)
        for activation in ACTIVATIONS
        for bias, multiply, residual in product((False, True), repeat=3)
        if activation != "none" or bias or multiply or residual
    ),
    *(
        Epilogue(bias=bias, parts=(1,) * parts)
        for bias, parts in product((False, True), (2, 3))
    ),
)
"""All 31 that do anything to a value, and 4 with results in parts."""


def _meet(kernel: str, *pair: str) -> bool:
    """Returns whether two template arguments of a kernel meet in a function."""
    names = {*pair}
    if names <= {*WEIGHT} and kernel in SHARING:
        return False
    if names & {*PLACES}:
        return False
    return names.isdisjoint(EPILOGUE_ARGUMENTS) or names <= {
        *EPILOGUE_ARGUMENTS,
        *STORING,
    }


@cache
def _meeting(kernel: str, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Returns which two of a kernel's template arguments meet in a function."""
    every = combinations(range(len(names)), 2)
    return [(i, j) for i, j in every if _meet(kernel, names[i], names[j])]


@dataclass(frozen=True)
class Variant:
    """One instance of a kernel."""

    # "gemv", "gemm_register", "gemm_staged", "gemm_tensor", "reduce", "dequantize",
    # "gather", "pack" or "unpack"
    kernel: str
    kind: str  # "plain", "fused", "gated", "normed", "normed gated" or "atomic"
    # Template arguments and dtypes, by name
    values: tuple[tuple[str, build.TemplateValue], ...]

    @property
    def source(self) -> source.Source:
        if self.kind in ("plain", "atomic"):
            return metal_source.kernel_source(self.kernel, self.kind == "atomic")
        return metal_source.kernel_source(
            f"{self.kernel}_{self.kind.replace(' ', '_')}"
        )

    @property
    def pairs(self) -> Iterator["Pair"]:
        """Every two values that meet in a function; the kind is one."""
        values = (("kind", self.kind), *self.values)
        names = tuple(name for name, _ in values)
        return ((values[i], values[j]) for i, j in _meeting(self.kernel, names))

    def call(self) -> dict[str, Any]:
        """Arguments of a call that asks for this instance."""
        values = dict(self.values)
        dtypes: dict[str, mx.Dtype] = {
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
        if name in source.NUMBERS:
            yield mx.zeros(7, mx.int32)  # fewer than eight: constant memory
        elif name in ("w", "second", "sources", "experts"):
            yield mx.zeros(8, mx.uint32)
        elif name == "parts":
            yield mx.zeros(3, mx.int32)
        elif name == "partials":
            yield mx.zeros(8, mx.float32)
        elif name in (*source.EPILOGUE_INPUTS, *source.EXPERT_BIASES):
            yield mx.zeros(8, dtypes["out"])
        else:
            yield mx.zeros(8, dtypes["x" if name in ("x", *source.NORM) else "scales"])


def variants_of(plan: Plan) -> list[Variant]:
    """The instances that a plan launches."""
    problem = plan.problem
    out = "float32" if plan.is_split else problem.dtype
    dtypes = {"x": problem.dtype, "scales": problem.scale_dtype, "out": out}
    finished = "plain" if problem.epilogue == PLAIN else "fused"
    finished = "gated" if problem.epilogue.gated else finished
    finished = NORMED[finished] if problem.norm is not None else finished
    kinds = {"none": finished, "workspace": "plain", "atomic": "atomic"}
    values = {**metal_arguments.product_template(plan), **dtypes}
    found = [Variant(plan.kernel, kinds[plan.reduction], tuple(values.items()))]
    if plan.needs_second_pass:
        values = {**metal_arguments.reduce_template(plan), "out": problem.dtype}
        found.append(Variant("reduce", finished, tuple(values.items())))
    return found


def decoder_of(problem: Problem) -> Variant:
    """The instance that decodes a problem's weight."""
    dtypes = {"scales": problem.scale_dtype, "out": problem.dtype}
    values = {**build.weight_template(problem), **dtypes}
    return Variant("dequantize", "plain", tuple(values.items()))


def gathers_of(problem: Problem) -> Iterator[Variant]:
    """The instances that multiply rows by experts, few of each and many.

    Invariant ones have no dot products. On an M1 fewer fragments are planned for.
    Packed weights may be gated.
    """
    dtypes = {"x": problem.dtype, "scales": problem.scale_dtype, "out": problem.dtype}
    chips = [device.Device.named(name) for name in ("Apple M1", "Apple M3")]
    for m, n, invariant, chip in product((8, 512), (64, 63), (False, True), chips):
        each = replace(problem, m=m, n=n, invariant=invariant)
        gated = each.layout == "marlin" and not invariant
        for gate, bias in product((None, *GATES) if gated else (None,), (False, True)):
            gather = GatherProblem(problem=each, experts=8, gate=gate, bias=bias)
            plan = planner.choose_gather(gather, chip)
            values = {**metal_arguments.gather_template(plan), **dtypes}
            kind = "fused" if gather.is_fused else "plain"
            yield Variant("gather", kind, tuple(values.items()))


def repacks() -> Iterator[Variant]:
    """The instances that move codes of any width, to tiles and back."""
    for bits, order in product(WIDTHS_OF_CODES, ("k32", "k64")):
        values = {**metal_arguments.repack_template(bits, order), "out": "uint32"}
        for kernel in ("pack", "unpack"):
            yield Variant(kernel, "plain", tuple(values.items()))


@cache
def every_variant() -> tuple[Variant, ...]:
    """Every instance that matters, with one epilogue for each body.

    That is every body with affine codes of 4 bits in groups of 64, and every format
    with some of the bodies, other ones for each: with all of them there would be
    millions of instances.
    Bodies draw the epilogues, so that every flag of one meets every body's value.
    """
    problems = [*_problems()]
    found = dict.fromkeys(map(decoder_of, problems))
    found.update(dict.fromkeys(repacks()))
    found.update(dict.fromkeys(chain.from_iterable(map(gathers_of, problems))))
    bodies = (body for each in problems for body in _bodies_to_meet(each))
    draw = random.Random(1)
    for body in bodies:
        times = 3 if _is_commonest(body.problem) else 1
        for epilogue in draw.sample(EPILOGUES, times):
            plans = (*_plans(body, epilogue), *_gated(body, epilogue.activation))
            for plan in (*plans, *filter(None, map(_normed, plans))):
                found.update(dict.fromkeys(variants_of(plan)))
    return tuple(found)


BODIES_OF_FORMAT = 3
"""How many bodies of a kernel every other format meets, in a dtype and a layout."""


def _bodies_to_meet(problem: Problem) -> list[Plan]:
    bodies = [*_bodies(problem)]
    if _is_commonest(problem):
        return bodies
    draw = random.Random(problem.explain())
    kernels = dict.fromkeys(body.kernel for body in bodies)
    return [
        body
        for kernel in kernels
        for body in draw.sample(
            [each for each in bodies if each.kernel == kernel], BODIES_OF_FORMAT
        )
    ]


def _is_commonest(problem: Problem) -> bool:
    return (problem.mode, problem.bits, problem.group_size) == ("affine", 4, 64)


def _problems() -> Iterator[Problem]:
    for format, dtype in product(FORMATS.values(), DTYPE_BYTES):
        groups = (
            (group_size, layout)
            for layout in format.layouts
            for group_size in format.group_sizes_in(layout)
        )
        for group_size, layout in groups:
            for scale_dtype, is_global in product(
                _scale_dtypes(format, dtype), {False, format.mode == "nvfp4"}
            ):
                yield Problem(
                    m=1,
                    n=64,
                    k=1024,
                    group_size=1024 if group_size == CHANNEL else group_size,
                    bits=format.bits,
                    mode=format.mode,
                    dtype=dtype,
                    scale_dtype=scale_dtype,
                    layout=layout,
                    global_scale=is_global,
                )


def _scale_dtypes(format: Format, dtype: str) -> tuple[str, ...]:
    """MLX promotes x to its scales' dtype: only float32 meets narrower ones."""
    return format.scale_dtypes if dtype == "float32" else (format.scale_dtype(dtype),)


def _bodies(problem: Problem) -> Iterator[Plan]:
    """Every valid body, with one threadgroup for each of two tiles."""
    bodies = [(0, 1, rows) for rows in range(1, GEMV_ROWS[problem.dtype] + 1)]
    simdgroups = range(1, MAX_SIMDGROUPS + 1)
    bodies += [(f, s, FRAGMENT * f * s) for f in FRAGMENTS_M for s in simdgroups]
    bodies.append((THREE_FRAGMENTS_M, 1, FRAGMENT * THREE_FRAGMENTS_M))
    for (fragments_m, simdgroups_m, rows), simdgroups_k in product(bodies, simdgroups):
        if simdgroups_m * simdgroups_k > MAX_SIMDGROUPS:
            continue
        tile = Tile(m=rows, k=k_tile(problem.group_size))
        kernel: Kernel = "gemm_register" if fragments_m else "gemv"
        for operand in format_cases.operands_of(problem, kernel):
            body = MetalPlan(
                problem=replace(problem, m=rows),
                kernel=kernel,
                tile=tile,
                fragments_m=fragments_m,
                simdgroups_m=simdgroups_m,
                simdgroups_k=simdgroups_k,
                work=data_parallel(2, problem.k // tile.k),
                operand=operand,
            )
            yield body
            if fragments_m and {simdgroups_m, simdgroups_k} <= {*STAGED_SIMDGROUPS}:
                yield from strategies.stagings(body, STAGING)
    given = problem.mode, problem.group_size, problem.dtype
    if format_cases.has_tensor_products(*given):
        yield from _tensor_bodies(problem)


def _tensor_bodies(problem: Problem) -> Iterator[Plan]:
    sides = range(1, MAX_SIMDGROUPS_M + 1)
    counts = range(1, MAX_SIMDGROUPS + 1)
    for fragments_m, side, count in product(TENSOR_FRAGMENTS_M, sides, counts):
        rows = FRAGMENT * fragments_m * side
        tile = Tile(m=rows, k=k_tile(problem.group_size))
        if side * count > MAX_SIMDGROUPS:
            continue
        for operand in format_cases.operands_of(problem, "gemm_tensor"):
            yield MetalPlan(
                problem=replace(problem, m=rows),
                kernel="gemm_tensor",
                tile=tile,
                fragments_m=fragments_m,
                simdgroups_m=side,
                simdgroups_k=count,
                work=data_parallel(2, problem.k // tile.k),
                operand=operand,
            )


def _plans(body: Plan, epilogue: Epilogue) -> Iterator[Plan]:
    """A body alone, with an epilogue, with wide tiles, and split both ways.

    Also with a ragged last tile, with one threadgroup for both tiles, and of a batch.
    """
    work = body.work
    both = Work(strategy="stripe", tiles=2, k_tiles=work.k_tiles, threadgroups=1)
    for problem in (body.problem, _finished(body.problem, epilogue)):
        yield replace(body, problem=problem)
        yield replace(body, problem=problem, work=both)
        yield replace(body, problem=_with_n(problem, body.problem.n - 1))
    problem, fused = body.problem, _finished(body.problem, epilogue)
    for width in WIDTHS:
        if body.simdgroups_k % width == 0 and body.kernel != "gemm_tensor":
            wide = replace(work, strategy="hytis", whole=1)
            wide_n = TILE_N * (width + 1)
            for each, n in product((problem, fused), (wide_n, wide_n - 1)):
                yield replace(
                    body, problem=_with_n(each, n), work=wide, simdgroups_n=width
                )
    split = replace(work, strategy="split_k", threadgroups=4, whole=0, slices=2)
    reductions: tuple[Reduction, ...] = ("workspace", "atomic")
    for reduction, each in product(reductions, (problem, fused)):
        yield replace(body, problem=each, work=split, reduction=reduction)
    if body.kernel == "gemm_staged":  # takes one weight
        return
    # Results in parts are of one weight too.
    whole = epilogue if not epilogue.parts else Epilogue(bias=True)
    fused = replace(problem, epilogue=whole)
    several = replace(problem, batch=2)
    yield replace(body, problem=several, work=data_parallel(4, work.k_tiles))
    run = replace(both, tiles=4)
    for each in (replace(several, n=problem.n - 1), replace(fused, batch=2)):
        yield replace(body, problem=each, work=run)
    split = replace(split, tiles=4, threadgroups=8)
    for reduction, each in zip(reductions, (fused, problem), strict=True):
        several = replace(each, batch=2)
        yield replace(body, problem=several, work=split, reduction=reduction)


def _gated(body: Plan, activation: str) -> Iterator[Plan]:
    """A body with a gated epilogue, with whole tiles and with a ragged last one."""
    if body.simdgroups_k % 2 or body.kernel in ("gemm_staged", "gemm_tensor"):
        return
    epilogue = Epilogue(activation=activation, gated=True)
    tile = replace(body.tile, n=2 * TILE_N)
    for n in (4 * TILE_N, 4 * TILE_N - 2)[: 1 + (body.problem.layout == "mlx")]:
        problem = replace(body.problem, n=n, epilogue=epilogue)
        yield replace(body, problem=problem, tile=tile, simdgroups_n=2)


def _normed(plan: Plan) -> Plan | None:
    """Returns a plan with a norm, if its kernel takes one."""
    problem = plan.problem
    whole = plan.kernel == "gemv" and plan.work.strategy == "data_parallel"
    if not whole or problem.m > NORM_ROWS or problem.batch > 1:
        return None
    return replace(plan, problem=replace(problem, norm=1e-5))


def _finished(problem: Problem, epilogue: Epilogue) -> Problem:
    *first, _ = epilogue.parts or (0,)
    parts = (*first, problem.n - sum(first)) if epilogue.parts else ()
    fitting = replace(epilogue, parts=parts)
    return replace(problem, epilogue=fitting)


def _with_n(problem: Problem, n: int) -> Problem:
    plain = replace(problem, epilogue=PLAIN, n=n)
    return _finished(plain, problem.epilogue)


@cache
def chosen_variants() -> tuple[Variant, ...]:
    """The instances that are chosen for the demo and the table of shapes.

    For the chip of which nothing is known, and half activations; every other one has
    the same values, paired otherwise.
    """
    found: dict[Variant, None] = {}
    # The demo's weights, in both layouts.
    likes = [Problem(m=1, n=64, k=1024, layout=layout) for layout in ("mlx", "marlin")]
    for like, (n, k), m in product(likes, SHAPES, ROWS):
        plan = planner.choose(replace(like, m=m, n=n, k=k), device.DEFAULT)
        found.update(dict.fromkeys(variants_of(plan)))
    return tuple(found)


OLDEST, OLDEST_TENSORS = "14.0", "26.2"
"""Versions of macOS that MLX's wheel and its tensor operations need. The language is
that in which MLX compiles there."""

RECORDED = Path(__file__).parents[1] / "data" / "covering_variants.json"


@cache
def covering_variants() -> tuple[Variant, ...]:
    """Returns the recorded instances, which let every two values meet.

    `python tests/covering_variants.py` chooses and records them.
    """
    return tuple(
        Variant(each["kernel"], kind, tuple(zip(each["names"], values, strict=True)))
        for each in json.loads(RECORDED.read_text())
        for kind, *values in each["instances"]
    )


@cache
def ordinary_variants() -> tuple[Variant, ...]:
    """All instances but those with numbers of simdgroups that only a wish asks for."""
    return tuple(each for each in every_variant() if _is_ordinary(each))


def _is_ordinary(variant: Variant) -> bool:
    """Returns whether a plan can have so many simdgroups without a wish for them."""
    values = dict(variant.values)
    along_k = values.get("SIMDGROUPS_K", 1) in SIMDGROUPS_K
    return along_k and int(values.get("SIMDGROUPS_M", 1)) <= MAX_SIMDGROUPS_M


def checked(variants: Sequence[Variant]) -> frozenset[tuple[str, ...]]:
    """Checks instances of one kernel; returns the operands of their multiplications."""
    text = variants[0].source
    return check(
        text.name,
        text.input_names,
        text.output_names,
        text.source,
        text.header,
        atomic_outputs=text.atomic,
        calls=[variant.call() for variant in variants],
        macos=OLDEST_TENSORS if TENSOR_HEADER in text.header else OLDEST,
    )


Pair = tuple[tuple[str, build.TemplateValue], ...]
