"""The output of `mlx-marlin tune`: tables of plans and times."""

from pathlib import Path

from mlx_marlin import guard
from mlx_marlin.measure import tuner
from mlx_marlin.measure.timing import Spread
from mlx_marlin.measure.tuner import Arm, Clock, Outcome
from mlx_marlin.planning.choice import aligned
from mlx_marlin.planning.problem import Problem


def measurements(problem: Problem, outcome: Outcome, clock: Clock) -> str:
    """Returns the table of measured times of a problem and the plan that is kept."""
    rows = [["", f"us ({clock.name})", "+-", ""]]
    rows += [
        _row(arm, spread, _verdict(arm, outcome))
        for arm, spread in outcome.arms.items()
    ]
    failed = "a kernel failed its check, never used"
    rows += [[tuner.name(plan), "", "", failed] for plan in outcome.failed]
    samples = max((spread.samples for spread in outcome.arms.values()), default=1)
    how = f": medians of {samples}, +- half the interquartile range"
    return f"{problem.explain()}{how if samples > 1 else ''}\n{aligned(rows)}"


def conclusion(kept: int, problems: int, file: Path) -> str:
    """Returns where results are kept, and who serves the problems without a result.

    Args:
        kept: Number of problems with a result.
        problems: Number of problems measured.
        file: The file of results.
    """
    if kept == problems:
        return f"kept in {file}"
    served = (
        "stock MLX serves them"
        if guard.is_on()
        else f"set {guard.ENVIRONMENT}=1 to have stock MLX serve them"
    )
    failed = (
        f"all our plans of {problems - kept} of {problems} problems failed: {served}"
    )
    return f"{failed}\nkept in {file}" if kept else f"{failed}\nnothing was kept"


def _row(arm: Arm, spread: Spread, verdict: str) -> list[str]:
    median, noise = spread.median * 1e6, spread.range / 2 * 1e6
    return [tuner.name(arm), f"{median:.2f}", f"{noise:.2f}", verdict]


def _verdict(arm: Arm, outcome: Outcome) -> str:
    parts = ["the model's answer"] if arm == next(iter(outcome.arms)) else []
    if arm in outcome.wrong:
        parts.append("WRONG product, never used")
    result = outcome.result
    if result and arm == (None if result.stock else result.plan):
        parts.append("used from now on")
    return ", ".join(parts)
