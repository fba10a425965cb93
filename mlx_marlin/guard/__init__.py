"""The guard: a kernel is checked on this machine before it serves its first call.

Nothing can be assumed of a GPU's compiler. So the kernel variants of a plan run once on
small problems with known answers (`known_answers`), and the verdict is kept
(`verdicts`). Variants that do not compile, raise, end the process or compute something
else are not used: stock MLX serves, one warning names the kernel, and `why_not` returns
the reason.

`MLX_MARLIN_GUARD=0` switches the guard off. `1` switches it on for the emulator too,
where a broken kernel otherwise raises, as tests want it.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import selection, source
from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.metal import arguments
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.guard import known_answers, routing, verdicts
from mlx_marlin.guard.variants import AnyPlan, KernelVariant, digest, variants_of
from mlx_marlin.guard.verdicts import Verdict
from mlx_marlin.weights import dtypes

ENVIRONMENT = "MLX_MARLIN_GUARD"
TRANSIENT = (
    "out of memory",
    "insufficient memory",
    "unable to allocate",
    "cannot allocate memory",
    "no space left on device",
    "disk quota exceeded",
    "cannot open source file",  # NVRTC, of a header
    "could not open source file",
    "cannot open shared object file",
    "failed to open libnvrtc",
)
"""Parts of messages, in lower case, that do not depend on the kernel."""

_verdicts: dict[str, Verdict] = state.register({})
_warned: set[str] = state.register(set())


def is_on() -> bool:
    """Returns whether kernels are checked before they are used.

    Without a device nothing can be checked: graphs can be built and exported there.

    Raises:
        ValueError: If `MLX_MARLIN_GUARD` is neither 0 nor 1.
    """
    wish = os.environ.get(ENVIRONMENT, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}={wish!r}, expected 0, 1 or nothing")
    backend = selection.backend()
    if wish == "0" or backend == "stock" or selection.missing() is not None:
        return False
    return wish == "1" or backend in selection.ON_GPU


def why_not(plan: AnyPlan) -> str | None:
    """Returns why a plan's kernels must not be used here; None if they may.

    The first question for some kernel variants checks them, which compiles them.

    Args:
        plan: The plan that is to be served.
    """
    if not is_on():
        return None
    return _reason(verdict_of(plan))


def verdict_of(plan: AnyPlan) -> Verdict:
    """Returns the verdict on a plan's kernels; the first call checks them."""
    variants = variants_of(plan)
    return _verdict(variants, plan.explain(), partial(known_answers.fault_of, plan))


def condemn(plan: AnyPlan, fault: str) -> None:
    """Records that a plan's kernels computed something wrong, and warns.

    Args:
        plan: The plan whose product was wrong.
        fault: What was wrong.
    """
    if is_on():
        _keep_failure(variants_of(plan), plan.explain(), fault)


def repack_fault(to: str, bits: int, order: str) -> str | None:
    """Returns why a repack kernel must not be used here; None if it may.

    Args:
        to: The layout that codes come to, "mlx" or "marlin".
        bits: Bits of a code.
        order: The order of k, "k32" or "k64".
    """
    if not is_on():
        return None
    check = partial(known_answers.fault_of_repack, to, bits, order)
    example = f"{bits}-bit codes, order {order}"
    return _reason(_verdict(_repack_variants(to, bits, order), example, check))


def condemn_repack(to: str, bits: int, order: str, fault: str) -> None:
    """Records that a repack kernel moved codes to wrong places, and warns.

    Args:
        to: As for `repack_fault`, and so are `bits` and `order`.
        bits: Bits of a code.
        order: The order of k.
        fault: What was wrong.
    """
    if is_on():
        example = f"{bits}-bit codes, order {order}"
        _keep_failure(_repack_variants(to, bits, order), example, fault)


@state.cache(maxsize=256)
def route_fault(
    dtype: mx.Dtype, experts: int, choices: int, of_all: bool, last: bool
) -> str | None:
    """Returns why the kernel that chooses experts must not be used; None if it may.

    Args:
        dtype: Of the logits.
        experts: Logits of a row.
        choices: Experts of a row.
        of_all: As for `experts_launch.route`.
        last: Likewise.
    """
    if not is_on():
        return None
    asked = (experts, choices, of_all, last)
    names = ("EXPERTS", "EACH", "OF_ALL", "LAST")
    variants = _routing_variants("route", dtype, dict(zip(names, asked, strict=True)))
    check = partial(routing.fault_of_route, dtype, *asked)
    return _reason(_verdict(variants, f"{choices} of {experts} experts", check))


@state.cache(maxsize=256)
def combine_fault(dtype: mx.Dtype, n: int, choices: int) -> str | None:
    """Returns why the kernel that adds experts' results must not be used, or None.

    Args:
        dtype: Of the results.
        n: Columns of a result.
        choices: Results of a row.
    """
    if not is_on():
        return None
    variants = _routing_variants("combine", dtype, {"N": n, "EACH": choices})
    check = partial(routing.fault_of_combine, dtype, n, choices)
    return _reason(_verdict(variants, f"{choices} results of {n} columns", check))


def verdicts_so_far() -> list[Verdict]:
    """Returns the verdicts of this machine's cache and of this process, by kernels.

    Those of kernels that only other versions of this package have are left out.
    """
    kept = verdicts.kept(verdicts.machine_folder(selection.backend()))
    current = source.digest_of_shaders()
    found = [each for each in (kept | _verdicts).values() if each.shaders == current]
    return sorted(found, key=lambda each: (each.kernels, each.example))


def _verdict(
    variants: tuple[KernelVariant, ...], example: str, check: Callable[[], str | None]
) -> Verdict:
    key = digest(variants)
    if key not in _verdicts:
        blank = partial(_new_verdict, variants, example)

        def judged() -> Verdict:
            return blank(*_state_and_fault(check))

        file = verdicts.machine_folder(selection.backend()) / f"{key}.json"
        known = verdicts.checked(file, blank("started", ""), judged)
        if known.shaders != source.digest_of_shaders():
            # Of another version, in which these kernels were the same.
            known = replace(known, shaders=source.digest_of_shaders())
            verdicts.write(file, known)
        _verdicts[key] = known
        _warn(known)
    return _verdicts[key]


def _state_and_fault(check: Callable[[], str | None]) -> tuple[str, str]:
    try:
        with mx.stream(_device()):
            fault = check()
    except Exception as error:  # whatever a compiler, a driver or MLX raises
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
        return "undecided" if _is_transient(error) else "failed", text
    return ("failed", fault) if fault else ("passed", "")


def _is_transient(error: Exception) -> bool:
    """Returns whether a check failed for lack of memory, disk space or a tool chain.

    The same kernel may pass in the next process. Any other error is taken for the
    kernel's, because a kernel that fails in a new way must not run again.

    Args:
        error: What the check raised.
    """
    if isinstance(error, MemoryError | OSError | ImportError):
        return True
    text = str(error).lower()
    return any(part in text for part in TRANSIENT)


def _keep_failure(
    variants: tuple[KernelVariant, ...], example: str, fault: str
) -> None:
    key = digest(variants)
    verdict = _new_verdict(variants, example, "failed", fault)
    _verdicts[key] = verdict
    file = verdicts.machine_folder(selection.backend()) / f"{key}.json"
    verdicts.write(file, verdict)
    _warn(verdict)


def _new_verdict(
    variants: tuple[KernelVariant, ...], example: str, state: str, fault: str
) -> Verdict:
    return Verdict(
        kernels=" and ".join(each.source.name for each in variants),
        state=state,
        fault=fault,
        example=example,
        date=date.today().isoformat(),
        shaders=source.digest_of_shaders(),
    )


def _reason(verdict: Verdict) -> str | None:
    if verdict.failure is None:
        return None
    if verdict.state == "undecided":
        return f"the kernel {verdict.kernels} could not be checked: {verdict.failure}"
    return (
        f"the kernel {verdict.kernels} failed its check on this machine: "
        f"{verdict.failure}"
    )


def _warn(verdict: Verdict) -> None:
    """Warns of a failed check, once per process for each kernel."""
    if verdict.failure is None or verdict.kernels in _warned:
        return
    _warned.add(verdict.kernels)
    request = (
        "The next process checks it again"
        if verdict.state == "undecided"
        else "Please report this line with the output of `mlx-marlin doctor --json`"
    )
    warnings.warn(
        f"mlx_marlin: {_reason(verdict)}. Stock MLX serves in its place, with right "
        f"results. {request} (docs/troubleshooting.md)",
        RuntimeWarning,
        stacklevel=2,
    )


def _repack_variants(to: str, bits: int, order: str) -> tuple[KernelVariant, ...]:
    template = arguments.repack_template(bits, order)
    return (
        KernelVariant(
            source=metal_source.repack_source(to),
            template=(*template.items(),),
            dtypes=("uint32", "uint32"),
        ),
    )


def _routing_variants(
    body: str, dtype: mx.Dtype, template: dict[str, TemplateValue]
) -> tuple[KernelVariant, ...]:
    return (
        KernelVariant(
            source=cuda_source.routing_source(body),
            template=(*template.items(),),
            dtypes=(dtypes.dtype_name(dtype), "float32"),
        ),
    )


def _device() -> mx.Device:
    """Returns the device that kernels run on."""
    return mx.Device(mx.gpu if mx.is_available(mx.Device(mx.gpu)) else mx.cpu)
