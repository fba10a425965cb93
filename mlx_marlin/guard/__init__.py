"""The guard: every kernel is checked on this machine before it serves its first call.

A GPU compiler may miscompile a kernel. Therefore the kernel variants of a plan run once
on small problems with known answers (`known_answers`), and the verdict is stored
(`checks`, `verdicts`).
Variants that do not compile, raise, end the process or give wrong results are not used:
another kernel or stock MLX serves the calls, one warning names the kernel, and
`why_not` returns the reason. What a kernel assumes about tensor operations is checked
before it (`backends.base.Probe`).

`MLX_MARLIN_GUARD=0` disables the guard. `1` also enables it in the emulator, where a
defective kernel raises otherwise.
"""

import os
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import (
    kernels,
    registry,
    repack_launch,
    selection,
    source,
)
from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.base import Probe
from mlx_marlin.backends.blocks import launch as block_launch
from mlx_marlin.backends.experts import launch as experts_launch
from mlx_marlin.guard import blocks, checks, known_answers, routing, verdicts
from mlx_marlin.guard.variants import AnyPlan, KernelVariant, digest, variants_of
from mlx_marlin.guard.verdicts import Verdict
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights import dtypes

__all__ = [
    "ENVIRONMENT",
    "AnyPlan",
    "KernelVariant",
    "Verdict",
    "add_norm_fault",
    "combine_fault",
    "condemn",
    "condemn_repack",
    "digest",
    "is_on",
    "known_answers",
    "known_fault",
    "repack_fault",
    "rotation_fault",
    "route_fault",
    "variants_of",
    "verdict_of",
    "verdicts_so_far",
    "why_not",
]

ENVIRONMENT = "MLX_MARLIN_GUARD"


def is_on() -> bool:
    """Returns whether kernels are checked before they are used.

    They are not if the device is missing, where graphs can be built and exported but
    not run.

    Raises:
        ValueError: If `MLX_MARLIN_GUARD` is neither 0 nor 1.
    """
    setting = os.environ.get(ENVIRONMENT, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}={setting!r}, expected 0, 1 or nothing")
    backend = selection.backend()
    if kernels.are_deferred():
        return False  # nothing is evaluated, and decisions are dropped afterwards
    if setting == "0" or backend == "stock" or selection.missing() is not None:
        return False
    return setting == "1" or backend in selection.ON_GPU


def why_not(plan: AnyPlan) -> str | None:
    """Returns why a plan's kernels must not be used on this machine; None if they may.

    The first call for some kernel variants compiles and checks them.
    """
    if not is_on():
        return None
    return checks.reason(verdict_of(plan))


def known_fault(plan: AnyPlan) -> str | None:
    """Returns what an earlier check found wrong with a plan's kernels, or None.

    Unlike `why_not`, it runs nothing: kernels that nobody has checked have no fault.
    """
    if not is_on():
        return None
    for variants in (*map(_of_probe, _probes(plan)), variants_of(plan)):
        known = checks.known(variants)
        reason = None if known is None else checks.reason(known)
        if reason is not None:
            return reason
    return None


def verdict_of(plan: AnyPlan) -> Verdict:
    """Returns the verdict on a plan's kernels; the first call for them checks them.

    It is the one on a probe that a kernel depends on, if that failed.
    """
    for probe in _probes(plan):
        check = partial(known_answers.fault_of_probe, probe)
        verdict = checks.verdict(_of_probe(probe), plan.explain(), check)
        if verdict.failure is not None:
            return verdict
    variants = variants_of(plan)
    return checks.verdict(
        variants, plan.explain(), partial(known_answers.fault_of, plan)
    )


def condemn(plan: AnyPlan, fault: str) -> None:
    """Records that a plan's kernels gave a wrong result, and warns.

    Args:
        plan: The plan whose product was wrong.
        fault: What was wrong.
    """
    if is_on():
        checks.record_failure(variants_of(plan), plan.explain(), fault)


def repack_fault(to: str, bits: int, order: str) -> str | None:
    """Returns why a repack kernel must not be used on this machine; None if it may.

    Args:
        to: The layout of the result, "mlx" or "marlin".
        bits: Bits of a code.
        order: The order of k, "k32" or "k64".
    """
    if not is_on():
        return None
    check = partial(known_answers.fault_of_repack, to, bits, order)
    example = f"{bits}-bit codes, order {order}"
    return checks.reason(
        checks.verdict(_repack_variants(to, bits, order), example, check)
    )


def condemn_repack(to: str, bits: int, order: str, fault: str) -> None:
    """Records that a repack kernel gave a wrong result, and warns.

    Args:
        to: The layout of the result, "mlx" or "marlin".
        bits: Bits of a code.
        order: The order of k, "k32" or "k64".
        fault: What was wrong.
    """
    if is_on():
        example = f"{bits}-bit codes, order {order}"
        checks.record_failure(_repack_variants(to, bits, order), example, fault)


@state.cache(maxsize=256)
def route_fault(
    dtype: mx.Dtype, experts: int, choices: int, of_all: bool, last: bool
) -> str | None:
    """Returns why the routing kernel of experts must not be used; None if it may.

    Args:
        dtype: Dtype of the logits.
        experts: Number of experts.
        choices: Number of experts that a row chooses.
        of_all: As in `experts_launch.route`.
        last: As in `experts_launch.route`.
    """
    if not is_on():
        return None
    template: dict[str, TemplateValue] = {
        "EXPERTS": experts,
        "EACH": choices,
        "OF_ALL": of_all,
        "LAST": last,
    }
    variants = _routing_variants("route", dtype, template)
    check = partial(routing.fault_of_route, dtype, experts, choices, of_all, last)
    return checks.reason(
        checks.verdict(variants, f"{choices} of {experts} experts", check)
    )


@state.cache(maxsize=256)
def combine_fault(dtype: mx.Dtype, n: int, choices: int) -> str | None:
    """Returns why the kernel that adds experts' results must not be used, or None.

    Args:
        dtype: Dtype of the results.
        n: Columns of a result.
        choices: Number of results that are added for a row.
    """
    if not is_on():
        return None
    variants = _routing_variants("combine", dtype, {"N": n, "EACH": choices})
    check = partial(routing.fault_of_combine, dtype, n, choices)
    return checks.reason(
        checks.verdict(variants, f"{choices} results of {n} columns", check)
    )


@state.cache(maxsize=256)
def rotation_fault(
    heads: Heads, dtype: mx.Dtype, tokens: int, per_stream: bool
) -> str | None:
    """Returns why the kernel that rotates heads must not be used; None if it may.

    Args:
        heads: The heads.
        dtype: Dtype of the heads.
        tokens: New tokens of a stream.
        per_stream: Whether each stream has its own position.
    """
    if not is_on():
        return None
    template = block_launch.heads_template(heads, tokens, per_stream)
    check = partial(blocks.fault_of_rotation, heads, dtype, tokens, per_stream)
    example = f"{tokens} tokens, {heads.heads} + {heads.kv_heads} heads"
    text = block_launch.block_source("rotate_heads")
    return checks.reason(
        checks.verdict(_variants(text, dtype, template), example, check)
    )


@state.cache(maxsize=256)
def add_norm_fault(dtype: mx.Dtype, n: int, epsilon: float) -> str | None:
    """Returns why the kernel that adds and normalizes rows must not be used, or None.

    Args:
        dtype: Dtype of the rows.
        n: Values of a row.
        epsilon: Epsilon of the norm.
    """
    if not is_on():
        return None
    text = block_launch.block_source("add_norm")
    variants = _variants(text, dtype, block_launch.norm_template(n, epsilon))
    check = partial(blocks.fault_of_add_norm, dtype, n, epsilon)
    return checks.reason(checks.verdict(variants, f"rows of {n} values", check))


def verdicts_so_far() -> list[Verdict]:
    """Returns the verdicts on this machine's disk and of this process, sorted.

    Verdicts on kernels that only other versions of this package have are omitted.
    """
    stored = verdicts.stored(verdicts.machine_folder(selection.backend()))
    current = source.digest_of_shaders()
    found = (stored | checks.verdicts_so_far()).values()
    return sorted(
        (verdict for verdict in found if verdict.shaders == current),
        key=lambda verdict: (verdict.kernels, verdict.example),
    )


def _probes(plan: AnyPlan) -> Sequence[Probe]:
    return registry.of_plan(plan).probes(plan) if isinstance(plan, Plan) else ()


def _of_probe(probe: Probe) -> tuple[KernelVariant, ...]:
    return (
        KernelVariant(source=probe.source, template=probe.template, dtypes=("", "")),
    )


def _repack_variants(to: str, bits: int, order: str) -> tuple[KernelVariant, ...]:
    repack = repack_launch.repack_kernels()
    template = repack.template(bits, order)
    return (
        KernelVariant(
            source=repack.source(to),
            template=(*template.items(),),
            dtypes=("uint32", "uint32"),
        ),
    )


def _routing_variants(
    body: str, dtype: mx.Dtype, template: dict[str, TemplateValue]
) -> tuple[KernelVariant, ...]:
    return _variants(experts_launch.routing_source(body), dtype, template)


def _variants(
    text: source.Source, dtype: mx.Dtype, template: dict[str, TemplateValue]
) -> tuple[KernelVariant, ...]:
    return (
        KernelVariant(
            source=text,
            template=(*template.items(),),
            dtypes=(dtypes.dtype_name(dtype), "float32"),
        ),
    )
