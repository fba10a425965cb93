"""The output of `mlx-marlin tune`: tables of plans and times."""

from collections.abc import Sequence
from pathlib import Path

from mlx_marlin import guard
from mlx_marlin.measure import tuner
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.timing import Spread
from mlx_marlin.measure.tuner import Arm, Outcome
from mlx_marlin.planning.problem import Problem
from mlx_marlin.tables import aligned

WRONG = "WRONG product, never used"
FAILED = "a kernel failed its check, never used"
NOISY = "too noisy: nothing was kept, measure again"


def measurements(problem: Problem, outcome: Outcome, clock: Clock) -> str:
    """Returns the table of measured times of a problem and the plan that is kept."""
    rows = [["", f"us ({clock.name})", "+-", ""]]
    rows += [
        _row(arm, spread, _verdict(arm, outcome))
        for arm, spread in outcome.arms.items()
    ]
    rows += [[tuner.name(plan), "", "", FAILED] for plan in outcome.failed]
    samples = max((spread.samples for spread in outcome.arms.values()), default=1)
    how = f": medians of {samples}, +- half the interquartile range"
    noisy = [NOISY] if outcome.is_noisy else []
    head = f"{problem.explain()}{how if samples > 1 else ''}"
    return "\n".join([head, aligned(rows), *noisy])


def notes(problem: Problem, outcome: Outcome) -> list[str]:
    """Returns what is wrong with the times of a problem, for a result file."""
    reasons = dict.fromkeys(outcome.wrong, WRONG) | dict.fromkeys(
        outcome.failed, FAILED
    )
    found = [f"{tuner.name(plan)}: {reason}" for plan, reason in reasons.items()]
    found += [NOISY] if outcome.is_noisy else []
    return [f"{problem.explain()}: {each}" for each in found]


def conclusion(outcomes: Sequence[Outcome], file: Path) -> str:
    """Returns where results are kept, and who serves the problems without a result."""
    noisy = sum(each.is_noisy for each in outcomes)
    kept = sum(each.result is not None for each in outcomes)
    failed, of = len(outcomes) - kept - noisy, f"of {len(outcomes)} problems"
    lines = []
    if failed:
        served = (
            "stock MLX serves them"
            if guard.is_on()
            else f"set {guard.ENVIRONMENT}=1 to have stock MLX serve them"
        )
        lines.append(f"all our plans of {failed} {of} failed: {served}")
    if noisy:
        lines.append(f"{noisy} {of}: {NOISY}")
    return "\n".join([*lines, f"kept in {file}" if kept else "nothing was kept"])


def _row(arm: Arm, spread: Spread, verdict: str) -> list[str]:
    median, noise = spread.median * 1e6, spread.range / 2 * 1e6
    return [tuner.name(arm), f"{median:.2f}", f"{noise:.2f}", verdict]


def _verdict(arm: Arm, outcome: Outcome) -> str:
    parts = ["the model's answer"] if arm == next(iter(outcome.arms)) else []
    if arm in outcome.wrong:
        parts.append(WRONG)
    result = outcome.result
    if result and arm == (None if result.stock else result.plan):
        parts.append("used from now on")
    return ", ".join(parts)
