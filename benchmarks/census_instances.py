"""The kernels that the census compiles: what plans choose, and every pair of values.

They come from the recorded plans and the covering set of the tests, each with the text
that MLX hands to Metal and the architectures that would run it.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.apple_tools import ARCHITECTURES
from metal_emulator.dispatch import Dispatch, record
from mlx_marlin.backends import kernels, planner
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.launch import Launch, Operand
from mlx_marlin.backends.metal import probes, source
from mlx_marlin.backends.metal.kernel_limits import PROBED
from mlx_marlin.backends.metal.launches import launches
from mlx_marlin.backends.metal.main_loop import MATRIX_OPS, count
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RoutePlan,
)
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.weights import dtypes
from mlx_marlin.weights.formats import CODES, DTYPE_BYTES

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import recorded_plans
from support.shader_variants import covering_variants

TENSOR_ARCHITECTURES = ARCHITECTURES[-2:]
COVERING = ("applegpu_g13g", "applegpu_g16g")
"""Where the covering set is compiled: the most registers of a thread and the fewest."""
MOST = 1500
QUICK = 40
Template = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A kernel with template arguments.

    Attributes:
        kernel: Name of our kernel.
        function: Name of the function in `text`.
        text: The text that MLX generates.
        format: Codes and bits, such as "affine-4", or "" if it reads no weight.
        template: Template arguments and dtypes, in words.
        chosen: Architectures for which the planner chooses it.
        others: Further architectures to compile it for.
        registers: Our count of a thread's 32-bit registers, or None.
        instructions: Our count of an iteration of the main loop, or None; for float16.
        is_tensor: Whether it has tensor operations, which need macOS 26.2.
    """

    kernel: str
    function: str
    text: str
    format: str
    template: str
    chosen: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    registers: int | None = None
    instructions: int | None = None
    is_tensor: bool

    @property
    def architectures(self) -> tuple[str, ...]:
        """Where it is compiled."""
        return tuple(sorted({*self.chosen, *self.others}))


def every_instance() -> list[Instance]:
    """Returns all instances, each text once.

    Raises:
        ValueError: If there are more than `MOST`.
    """
    found: dict[str, Instance] = {}
    for instance in (*_recorded(), *_blocks(), *_covering(), *_probes()):
        known = found.setdefault(instance.text, instance)
        found[instance.text] = replace(
            known,
            chosen=tuple(sorted({*known.chosen, *instance.chosen})),
            others=tuple(sorted({*known.others, *instance.others})),
            registers=known.registers or instance.registers,
            instructions=known.instructions or instance.instructions,
        )
    if len(found) > MOST:
        raise ValueError(f"{len(found)} instances, expected at most {MOST}")
    return [*found.values()]


def quick(instances: Sequence[Instance]) -> list[Instance]:
    """Returns some instances, of every kernel at least one, spread over all."""
    first = {each.kernel: each for each in reversed(instances)}
    step = max(len(instances) // (QUICK - len(first)), 1)
    chosen = {each.text: each for each in first.values()}
    for each in instances[::step]:
        if len(chosen) < QUICK:
            chosen.setdefault(each.text, each)
    return [*chosen.values()]


def shard(instances: Sequence[Instance], index: int, count: int) -> list[Instance]:
    """Returns the instances of a shard; all shards together have each once."""
    return [*instances[index - 1 :: count]]


def _recorded() -> Iterator[Instance]:
    """Yields what plans launch for the recorded problems of Apple chips."""
    for name, plans in recorded_plans.recorded().items():
        chip = named(name)
        if chip.backend != "metal":
            continue
        number = chip.arch_gen  # type: ignore[attr-defined]
        sizes = tuple(each for each in ARCHITECTURES if f"_g{number}" in each)
        for text in plans:
            problem = recorded_plans.pair_of(name, text).problem
            plan = planner.choose(problem, chip)
            for index, launch in enumerate(launches(plan)):
                counts = _counts(plan) if index == 0 else {}
                yield _of_launch(launch, chosen=sizes, **counts)


def _counts(plan: object) -> dict[str, int | None]:
    """Returns our counts of a plan's first kernel."""
    assert isinstance(plan, MetalPlan)
    return {
        "registers": plan.registers,
        "instructions": _instructions(plan),
    }


def _instructions(plan: MetalPlan) -> int | None:
    problem, fragments_m = plan.problem, plan.fragments_m
    if problem.dtype != "float16" or plan.kernel not in ("gemv", "gemm_register"):
        return None
    if fragments_m == 0:
        return count(problem, 0, plan.operand, rows=plan.tile.m).slots
    counts = count(problem, fragments_m, plan.operand)
    return counts.slots + MATRIX_OPS[fragments_m]


def _covering() -> Iterator[Instance]:
    for variant in covering_variants():
        call = variant.call()
        values = dict(variant.values)
        instance = _instance(
            variant.source, call, {**values, "kind": variant.kind}.items()
        )
        others = TENSOR_ARCHITECTURES if instance.is_tensor else COVERING
        yield replace(instance, others=others)


def _blocks() -> Iterator[Instance]:
    """Yields the kernels that are no products, in shapes of an 8B model and experts."""
    heads = Heads(heads=32, kv_heads=8, features=128, columns=6144, norm=1e-6)
    for dtype in DTYPE_BYTES:
        for plan in (
            RoutePlan(8, dtype, 128, 8, of_all=False, last=False),
            CombinePlan(8, dtype, 2048, 8),
            HeadsPlan(heads, dtype, 2, 3, True),
            AddNormPlan(1, dtype, 4096, 1e-5),
        ):
            yield _of_launch(*launches(plan), chosen=ARCHITECTURES)


def _probes() -> Iterator[Instance]:
    """Yields the probes of operands and of tensor operations.

    One more is of an operation of 32 rows of x: `gemm_tensor` has operations of 16
    rows, and no layout of one with 32 is published.
    """
    for form in PROBED:
        yield _of_launch(probes.probe(form).launch, chosen=ARCHITECTURES)
    for dtype in ("float16", "bfloat16"):
        problem = problem_of(16, 4096, 4096, dtype=dtype)
        plan = planner.make(problem, device=named("M5"), kernel="gemm_tensor")
        assert isinstance(plan, MetalPlan)
        for probe in probes.probes(plan):
            yield _of_launch(probe.launch, chosen=TENSOR_ARCHITECTURES)
        launch = probes.layout_probe(dtype).launch
        text = launch.source
        wide = text.header.replace("Descriptor(32,16,32", "Descriptor(32,32,32")
        assert wide != text.header
        name = f"{text.name}_32_rows"
        launch = replace(launch, source=replace(text, name=name, header=wide))
        yield _of_launch(launch, others=TENSOR_ARCHITECTURES)


def _of_launch(launch: Launch, **more: Any) -> Instance:
    integers = dict(launch.integers)
    dtype_names = [*(each.dtype for each in launch.inputs), *_outputs(launch)]
    call = {
        "inputs": [_blank(each, integers) for each in launch.inputs],
        "template": kernels.template(launch.template),
        "grid": launch.grid,
        "threadgroup": launch.threadgroup,
        "output_shapes": [(8,) for _ in launch.outputs],
        "output_dtypes": [dtypes.dtype(each) for each in _outputs(launch)],
    }
    words = (*launch.template, ("dtypes", " ".join(dtype_names)))
    return replace(_instance(launch.source, call, words), **more)


def _outputs(launch: Launch) -> list[str]:
    return [each.dtype for each in launch.outputs]


def _blank(operand: Operand, integers: dict[str, tuple[int, ...]]) -> mx.array:
    """Returns an input of which MLX reads dtype and size: few values are constants."""
    values = integers.get(operand.name)
    if values is not None:
        return mx.array(values, mx.int32)
    return mx.zeros(8, dtypes.dtype(operand.dtype))


def _instance(
    text: Source, call: dict[str, Any], words: Iterable[tuple[str, Any]]
) -> Instance:
    dispatch = _generated(text, call)
    values = dict(words)
    is_weight = {"MODE", "BITS"} <= values.keys()
    return Instance(
        kernel=text.name,
        function=dispatch.kernel,
        text=dispatch.text,
        format=_format(values["MODE"], values["BITS"]) if is_weight else "",
        template=" ".join(f"{name}={value}" for name, value in values.items()),
        is_tensor=source.TENSOR_HEADER in text.header,
    )


def _format(mode: int, bits: int) -> str:
    """Returns the name of a format; a mode after all codes has a global scale."""
    codes = CODES[mode] if mode < len(CODES) else "nvfp4-global"
    return f"{codes}-{bits}"


def _generated(text: Source, call: dict[str, Any]) -> Dispatch:
    """Returns the dispatch that MLX generates, without running it."""
    kernel: Any = mx.fast.metal_kernel(
        text.name,
        text.input_names,
        text.output_names,
        text.source,
        text.header,
        True,
        text.atomic,
    )
    rest = {name: value for name, value in call.items() if name != "inputs"}
    return record(lambda *blanks: kernel(inputs=list(blanks), **rest), call["inputs"])
