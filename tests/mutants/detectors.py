"""What may notice a bug. Each returns what it has to say, or None if all seems well."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

import metal_emulator
from mlx_marlin.backends.metal.plan import barriers
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.formats import TILE_N, format_of
from mutants.cases.case import Case, Judge
from mutants.cases.experts import miscounted
from mutants.cases.repack import RepackCase
from mutants.mutant import Detector
from support import epilogues, format_cases, oracles, orders, shader_variants
from support.expert_products import ExpertProducts

Verdict = str | None


def detect(detector: Detector, case: Case | Judge) -> Verdict:
    """Asks one detector about the shaders as they are now."""
    if detector in REPORTS:
        return _reported(REPORTS[detector], case)
    return _JUDGES[detector](case)


TIME_LIMIT = 5.0
"""Seconds that a threadgroup of a case may take; it takes hundredths."""
_RACE = "race between"
_UNWRITTEN = "read of a value that was never written"
_ENDLESS = "the kernel has an endless loop"
REPORTS = {
    Detector.OUTSIDE: (" outside ",),
    Detector.RACE: (_RACE,),
    Detector.UNWRITTEN: (_UNWRITTEN,),
    # Which one it is depends on who comes first.
    Detector.TOO_EARLY: (_RACE, _UNWRITTEN),
    Detector.OUT_OF_STEP: (_RACE, _UNWRITTEN, "livelock", _ENDLESS),
    Detector.BARRIER_SITES: ("simdgroups wait at different barriers",),
    Detector.MISSING_THREADS: ("barrier not reached by all threads",),
    Detector.MISALIGNED: ("misaligned access",),
    Detector.ENDLESS: (_ENDLESS,),
    Detector.LANES: (
        *("a lane holds", "has never set", "missing lanes"),
        "in different operations",
    ),
}
"""What the emulator's report says in its first line, by detector."""


def _reported(sentences: Sequence[str], case: Case) -> Verdict:
    """The emulator's report in trace mode, if it is one of those that are asked for."""
    try:
        # One worker: of several faults, always the same is met first.
        with metal_emulator.emulated(workers=1, trace=True, time_limit=TIME_LIMIT):
            case.run(*case.arrays())
    except metal_emulator.EmulatorError as error:
        first_line, *_ = str(error).splitlines()
        if any(sentence in first_line for sentence in sentences):
            return str(error)
        raise
    return None


def _wrong_result(case: Case | Judge) -> Verdict:
    """The float64 oracle, each element within the error of a float32 sum."""
    if not isinstance(case, Case):
        return case.wrong_result()
    x, native = case.arrays()
    problem = case.plan.problem
    y = case.run(x, native)
    if isinstance(case.plan, DequantizePlan):
        return _wrong_dequantized(case.plan, y, x, case.weight(native))
    if problem.epilogue != PLAIN or problem.batch > 1:
        return _wrong_finish(case, y)
    expected = oracles.exact(x) @ case.weight(native).decoded.T
    if np.all(np.abs(oracles.exact(y) - expected) <= _allowed(case, x, native)):
        return None
    return f"relative error {oracles.error(y, expected):.1e}"


def _allowed(case: Case, x: mx.array, native: tuple[mx.array, ...]) -> oracles.Floats:
    """Four units in the last place of all that is added, and the last rounding."""
    problem, weight = case.plan.problem, case.weight(native)
    known = format_of(problem.mode, problem.bits)
    offset = format_cases.offset_of(known, case.planned.operand)
    scale, value, bias = map(np.abs, weight.parts)
    terms = np.abs(oracles.exact(x)) @ (scale * (offset + value) + bias).T
    expected = np.abs(oracles.exact(x) @ weight.decoded.T)
    rounding = oracles.ROUNDING[problem.dtype] * expected
    return 4 * 2.0**-24 * terms + rounding + oracles.SMALLEST[problem.dtype]


def _wrong_dequantized(
    plan: DequantizePlan, y: mx.array, x: mx.array, weight: format_cases.Weight
) -> Verdict:
    """Likewise of a plain product with a decoded weight, which MLX adds up."""
    decoded = weight.decoded.T if plan.transposed else weight.decoded
    off = oracles.error(y, oracles.exact(x) @ decoded)
    return None if off < oracles.TOLERANCES["float32"] else f"relative error {off:.1e}"


def _wrong_finish(case: Case, y: mx.array) -> Verdict:
    """Likewise for what an epilogue makes of the product."""
    x, native = case.arrays()
    problem, finish = case.plan.problem, case.finish()
    native = (native[0], native[1], native[2])
    total = oracles.product(x, *native, group_size=problem.group_size)
    expected = epilogues.finished(total, finish, problem.epilogue)
    off = np.abs(oracles.exact(y) - expected)
    # Not a number is not within anything.
    if np.all(off <= epilogues.allowed(case.planned, x, native, finish)):
        return None
    return f"relative error {oracles.error(y, expected):.1e}"


def _order(case: Case) -> Verdict:
    """Bits: where only the order of addition rounds, it is the one that is promised."""
    problem = case.plan.problem

    y = case.run(orders.one_in_each_trip(problem), orders.ones(problem))

    try:
        orders.assert_promised(y, case.planned)
    except AssertionError as error:
        return str(error)
    return None


def _static_check(case: Case) -> Verdict:
    try:
        _operands_of(case)
    except metal_emulator.CompileError as error:
        return str(error)
    return None


def _operands(case: Case) -> Verdict:
    """Weights and activations enter a multiply as the plan says, the sum is float."""
    fragment = "half" if case.plan.problem.dtype == "float16" else "float"
    types = {"bfloat": ("bfloat", "bfloat"), "half_by_float": ("half", "float")}
    pair = types.get(case.planned.operand, (fragment, fragment))
    wanted = {("float", *pair, "float")}
    found = set(_operands_of(case))
    return None if found == wanted else f"multiplies {found}, expected {wanted}"


def _operands_of(case: Case) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for variant in shader_variants.variants_of(case.planned):
        found |= shader_variants.checked([variant])
    return found


def _counters(case: Case) -> Verdict:
    """Every word once for each simdgroup in m, every needed product once, no conflicts.

    For packed weights whose k is whole tiles. What is staged is read once for a tile.
    """
    if isinstance(case, RepackCase):
        return case.miscounted()
    if isinstance(case, ExpertProducts):
        return miscounted(case)
    plan, problem = case.planned, case.plan.problem
    fragments = -(-problem.m // 8)
    readers = plan.m_tiles if plan.buffers else -(-fragments // plan.fragments_m)
    columns = plan.n_tiles * TILE_N
    found = metal_emulator.trace(case.run, *case.arrays())[0]
    words, scratch = found.of("w"), found.of("scratch")
    counted = {
        "bytes of weights": words.read_bytes,
        "repeated bytes of weights": words.repeated_read_bytes,
        "matrix products": found.count("matrix"),
        "barriers": found.count("barrier"),
        "cycles of scratch": scratch.bank_cycles,
    }
    expected = {
        "bytes of weights": readers * columns * problem.k * problem.bits // 8,
        "repeated bytes of weights": 0,
        "matrix products": fragments * -(-problem.n // 8) * problem.k // 8,
        # After a threadgroup's only tile nothing is written to scratch.
        "barriers": plan.work.pieces * (1 if plan.is_whole else 2) + _of_stages(plan),
        "cycles of scratch": scratch.accesses,
    }
    wrong = [
        f"{counted[name]} {name}, expected {expected[name]}"
        for name in expected
        if counted[name] != expected[name]
    ]
    return ", ".join(wrong) or None


def _of_stages(plan: Plan) -> int:
    """Barriers between the stages of tiles that are whole."""
    if not plan.buffers:
        return 0
    return plan.work.tiles * barriers(-(-plan.problem.k // plan.stage_k), plan.buffers)


_JUDGES: dict[Detector, Callable[[Case], Verdict]] = {
    Detector.WRONG_RESULT: _wrong_result,
    Detector.ORDER: _order,
    Detector.STATIC_CHECK: _static_check,
    Detector.OPERANDS: _operands,
    Detector.COUNTERS: _counters,
}
