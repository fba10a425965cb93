"""What may notice a bug. Each returns what it has to say, or None if all seems well."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import mlx.core as mx
import numpy as np
import oracles
import shader_variants
from cases import Case
from mutant import Detector
from numpy.typing import NDArray

from mlx_marlin import emulator

Verdict = str | None
Vector = NDArray[np.float32]


def detect(detector: Detector, case: Case) -> Verdict:
    """Asks one detector about the shaders as they are now."""
    if detector in _REPORTS:
        return _reported(_REPORTS[detector], case)
    return _JUDGES[detector](case)


_RACE = "race between"
_UNWRITTEN = "read of a value that was never written"
_REPORTS = {
    Detector.OUTSIDE: (" outside ",),
    Detector.RACE: (_RACE,),
    Detector.UNWRITTEN: (_UNWRITTEN,),
    # Which one it is depends on who comes first.
    Detector.TOO_EARLY: (_RACE, _UNWRITTEN),
    Detector.BARRIER_SITES: ("simdgroups wait at different barriers",),
    Detector.MISSING_THREADS: ("barrier not reached by all threads",),
    Detector.MISALIGNED: ("misaligned access",),
}
"""What the emulator's report says in its first line, by detector."""


def _reported(sentences: Sequence[str], case: Case) -> Verdict:
    """The emulator's report in trace mode, if it is one of those that are asked for."""
    try:
        # One worker: of several faults, always the same is met first.
        with emulator.emulated(workers=1, trace=True):
            case.run(*case.arrays())
    except emulator.EmulatorError as error:
        first_line, *_ = str(error).splitlines()
        if any(sentence in first_line for sentence in sentences):
            return str(error)
        raise
    return None


def _wrong_result(case: Case) -> Verdict:
    """The float64 oracle, each element within the error of a float32 sum."""
    x, native = case.arrays()
    problem = case.plan.problem
    stock = mx.quantized_matmul(x, *native, group_size=problem.group_size, bits=4)
    y = case.run(x, native)
    try:
        oracles.assert_close(
            y,
            stock,
            x,
            native,
            group_size=problem.group_size,
            offset=0 if case.plan.subtract else 64,
        )
    except AssertionError:
        expected = oracles.product(x, *native, group_size=problem.group_size)
        return f"relative error {oracles.error(y, expected):.1e}"
    return None


def _order(case: Case) -> Verdict:
    """Bits: the k tiles of a simdgroup, then simdgroups, then slices, each ascending.

    Every k tile has one activation, weights are 1, and the plan subtracts the codes'
    offset, so only these additions round. Where two addends meet, either is first.
    """
    plan, problem = case.plan, case.plan.problem
    values = np.random.default_rng(0).standard_normal(
        (plan.k_tiles, problem.m), np.float32
    )
    x = np.zeros((problem.m, plan.k_tiles, plan.tile.k), np.float32)
    x[..., 0] = values.T
    weight = (
        mx.full((problem.n, problem.k // 8), 0x11111111, mx.uint32),
        mx.ones((problem.n, problem.groups)),
        mx.zeros((problem.n, problem.groups)),
    )

    y = np.array(case.run(mx.array(x.reshape(problem.m, problem.k)), weight))

    slices = map(plan.unit, range(plan.k_parallel))
    expected = _ascending(
        _ascending(
            _ascending(values[first:stop][simdgroup :: plan.simdgroups_k])
            for simdgroup in range(plan.simdgroups_k)
        )
        for first, stop in (
            (each.k_start // plan.tile.k, each.k_stop // plan.tile.k) for each in slices
        )
    )
    wrong = int((y != expected[:, None]).sum())
    return f"{wrong} of {y.size} elements have other bits" if wrong else None


def _ascending(addends: Iterable[Vector]) -> Vector:
    return reduce(np.add, addends)


def _static_check(case: Case) -> Verdict:
    try:
        _operands_of(case)
    except emulator.CompileError as error:
        return str(error)
    return None


def _operands(case: Case) -> Verdict:
    """Activations and weights enter a multiply as one type, the sum is float."""
    fragment = "half" if case.plan.problem.dtype == "float16" else "float"
    wanted = {("float", fragment, fragment, "float")}
    found = set(_operands_of(case))
    return None if found == wanted else f"multiplies {found}, expected {wanted}"


def _operands_of(case: Case) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for variant in shader_variants.variants_of(case.plan):
        text = variant.source
        found |= emulator.check(
            text.name,
            text.input_names,
            text.output_names,
            text.source,
            text.header,
            calls=[variant.call()],
        )
    return found


def _counters(case: Case) -> Verdict:
    """Every word once for each simdgroup in m, every needed product once, no conflicts.

    For packed weights whose k is whole tiles.
    """
    plan, problem = case.plan, case.plan.problem
    fragments = -(-problem.m // 8)
    readers = -(-fragments // plan.fragments_m)
    found = emulator.trace(case.run, *case.arrays())[0]
    words, scratch = found.of("w"), found.of("scratch")
    counted = {
        "bytes of weights": words.read_bytes,
        "repeated bytes of weights": words.repeated_read_bytes,
        "matrix products": found.count("matrix"),
        "barriers": found.count("barrier"),
        "cycles of scratch": scratch.bank_cycles,
    }
    expected = {
        "bytes of weights": readers * plan.n_tiles * 32 * problem.k // 2,
        "repeated bytes of weights": 0,
        "matrix products": fragments * plan.n_tiles * 4 * problem.k // 8,
        "barriers": 2 * plan.units,
        "cycles of scratch": scratch.accesses,
    }
    wrong = [
        f"{counted[name]} {name}, expected {expected[name]}"
        for name in expected
        if counted[name] != expected[name]
    ]
    return ", ".join(wrong) or None


_JUDGES: dict[Detector, Callable[[Case], Verdict]] = {
    Detector.WRONG_RESULT: _wrong_result,
    Detector.ORDER: _order,
    Detector.STATIC_CHECK: _static_check,
    Detector.OPERANDS: _operands,
    Detector.COUNTERS: _counters,
}
