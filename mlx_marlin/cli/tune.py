"""`mlx-marlin tune`: measures which plan is fastest here, and keeps it for serving."""

import argparse
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_marlin import guard, state
from mlx_marlin.backends import (
    devices,
    planner,
    registry,
    selection,
    tuned_results,
)
from mlx_marlin.cli import models
from mlx_marlin.planning.choice import aligned
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import eligibility
from mlx_marlin.tuning import layers, operands, tuner
from mlx_marlin.tuning.timing import Spread
from mlx_marlin.tuning.tuner import Arm, Clock, Outcome
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, MODES

ROWS = (1, 2, 4, 8, 16, 32)
"""Rows that are measured of a model or of a shape without them."""
MOST_SECONDS = 86400.0
"""Seconds for each problem: a day."""
BOTH = "both"
"""What `--layout` takes beside the layouts."""
SHAPE = re.compile(r"(?:(\d+)[x,])?(\d+)[x,](\d+)")

EPILOG = """
examples:
  mlx-marlin tune 8x4096x11008
  mlx-marlin tune 4096x4096 4096x11008 --rows 1,4,8 --dtype bfloat16
  mlx-marlin tune 8x4096x11008 --mode mxfp4 --layout both
  mlx-marlin tune mlx-community/Qwen3-4B-4bit --layout marlin
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "tune",
        description="Measure our plans and stock MLX on this machine, and keep what is "
        "fastest: products of these shapes then use it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL_OR_SHAPE",
        help="MxNxK or M,N,K; NxK for several M; or an mlx-lm model, folder or name",
    )
    parser.add_argument(
        "--rows", help=f"M to measure, such as 1,4,8; default: {_listed(ROWS)}"
    )
    parser.add_argument(
        "--layout",
        choices=(*LAYOUTS, BOTH),
        help="default: mlx, on CUDA marlin, or the only one that a format has",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPE_BYTES), help="default: float16, or the model's"
    )
    shapes = parser.add_argument_group("formats of shapes; a model has its own")
    shapes.add_argument("--mode", choices=MODES, help="default: affine")
    shapes.add_argument("--bits", type=int, help="of a code; default: the mode's")
    shapes.add_argument("--group-size", type=int, help="default: the mode's")
    parser.add_argument(
        "--seconds", type=float, default=tuner.SECONDS, help="for each problem"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only list what would be measured"
    )
    parser.add_argument(
        "--clear", action="store_true", help="remove all that was kept, first"
    )


def run(args: argparse.Namespace) -> int:
    """Tunes the problems; returns 1 if a plan's product was wrong."""
    if not args.targets and not args.clear:
        raise ValueError("name a shape such as 8x4096x11008, or a model; or --clear")
    if not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g} must be above 0")
    if args.seconds > MOST_SECONDS:
        raise ValueError(
            f"--seconds {args.seconds:g}, expected at most {MOST_SECONDS:g}"
        )
    if args.clear and args.dry_run:
        raise ValueError("--clear removes results and --dry-run nothing: name one")
    found = problems(args)
    for problem in found:
        operands.check(problem)
    found = _tunable(found)
    if args.dry_run:
        print("\n\n".join(listing(each, eligibility.target()) for each in found))
        return 0
    place = tuned_results.folder()
    clock = _clock(args.seconds, place) if found else None
    if args.clear:
        print(f"files removed from {place}: {tuned_results.clear(place)}")
    return _tune(found, eligibility.target(), clock, place) if clock else 0


def problems(args: argparse.Namespace) -> list[Problem]:
    """Returns the problems that the arguments name, each once."""
    rows = models.rows(args.rows) if args.rows else None
    several: list[Problem] = []
    for target in args.targets:
        shape = SHAPE.fullmatch(target)
        if shape is None:
            several += layers.with_rows(_model_problems(target, args), rows or ROWS)
            continue
        m, n, k = shape.groups()
        asked = _shape_problems(int(n), int(k), args)
        several += layers.with_rows(asked, rows or ([int(m)] if m else ROWS))
    return [*dict.fromkeys(several)]


def listing(problem: Problem, target: PlanningDevice) -> str:
    """Lists what would be measured for a problem, with what the model says of it."""
    times_stock = selection.backend() in selection.ON_GPU
    rows = [["", "us by the model, not measured"]]
    for arm in tuner.arms(problem, target, times_stock=times_stock):
        rows.append([tuner.name(arm), _predicted(arm, problem, target)])
    return f"{problem.explain()}\n{aligned(rows)}"


def _predicted(arm: Arm, problem: Problem, target: PlanningDevice) -> str:
    """Returns the model's microseconds; nothing if there is no model of stock MLX."""
    if arm is not None:
        return f"{planner.predict(arm, target).seconds * 1e6:.1f}"
    stock = registry.of_device(target).predict_stock(problem, target)
    return "" if stock is None else f"{stock.seconds * 1e6:.1f}"


def report(problem: Problem, outcome: Outcome, clock: Clock) -> str:
    """Says what was measured for a problem, and what is used from now on."""
    rows = [["", f"us ({clock.name})", "+-", ""]]
    rows += [
        _row(arm, spread, _verdict(arm, outcome))
        for arm, spread in outcome.arms.items()
    ]
    failed = "a kernel failed its check, never used"
    rows += [[tuner.name(plan), "", "", failed] for plan in outcome.failed]
    samples = max((each.samples for each in outcome.arms.values()), default=1)
    how = f": medians of {samples}, +- half the interquartile range"
    return f"{problem.explain()}{how if samples > 1 else ''}\n{aligned(rows)}"


def _tunable(found: list[Problem]) -> list[Problem]:
    """Returns the problems that can be tuned, and says why not of the others.

    Raises:
        ValueError: If there are problems, and none can be.
    """
    reasons = {each: tuner.why_not(each, eligibility.target()) for each in found}
    said = [
        f"{each.explain()}: not measured, {reason}"
        for each, reason in reasons.items()
        if reason is not None
    ]
    if said and len(said) == len(found):
        raise ValueError("\n".join(said))
    for each in said:
        print(each)
    return [each for each in found if reasons[each] is None]


def _clock(seconds: float, place: Path) -> Clock:
    """Returns the clock, if all that measuring needs is there.

    Raises:
        ValueError: If nothing here can be measured.
        OSError: If the folder cannot be written to.
    """
    if tuned_results.stands_for_another(selection.backend()):
        raise ValueError(
            f"{devices.ENVIRONMENT} names the chip to plan for, but the one here would "
            f"be measured: unset it"
        )
    clock = tuner.clock(eligibility.target(), seconds)
    _check_writable(place)  # before minutes are spent
    return clock


def _tune(
    found: list[Problem], target: PlanningDevice, clock: Clock, place: Path
) -> int:
    """Measures problem after problem, and keeps each result at once."""
    here = tuned_results.machine(target, selection.backend())
    wrong = kept = 0
    for problem in _shown(found):
        outcome = tuner.tune(problem, target, clock)
        _say(report(problem, outcome, clock))
        if outcome.result:
            tuned_results.write(place, here, [outcome.result])
            kept += 1
        wrong += len(outcome.wrong) + len(outcome.failed)
    state.reset()
    print(_kept(kept, len(found), place / here.file_name))
    return 1 if wrong else 0


def _kept(kept: int, problems: int, file: Path) -> str:
    """Returns what was kept, and who serves the problems of which nothing was."""
    if kept == problems:
        return f"kept in {file}"
    served = (
        "stock MLX serves them"
        if guard.is_on()
        else f"set {guard.ENVIRONMENT}=1 to have stock MLX serve them"
    )
    left = f"all our plans of {problems - kept} of {problems} problems failed: {served}"
    return f"{left}\nkept in {file}" if kept else f"{left}\nnothing was kept"


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


def _shape_problems(n: int, k: int, args: argparse.Namespace) -> list[Problem]:
    """Returns one row of a shape, in each layout."""
    asked = partial(
        problem_of,
        mode=args.mode or "affine",
        bits=args.bits,
        group_size=args.group_size,
        dtype=args.dtype or "float16",
    )
    packed = asked(1, n, k, layout="marlin")
    return [asked(1, n, k, layout=each) for each in _layouts(args, packed)]


def _layouts(args: argparse.Namespace, problem: Problem) -> tuple[str, ...]:
    """Returns the layouts to measure a problem's format in."""
    of_format = problem.format.layouts
    if args.layout is None:
        usual = _usual_layout()
        return (usual,) if usual in of_format else of_format[:1]
    return of_format if args.layout == BOTH else (args.layout,)


def _usual_layout() -> str:
    """Returns the layout of what `optimize` converts, unless another is named."""
    return selection.traits().default_layout


def _model_problems(name: str, args: argparse.Namespace) -> list[Problem]:
    """Returns one row of each product of a model, whose weights are not read."""
    for option in ("mode", "bits", "group_size"):
        if (value := getattr(args, option)) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is for shapes; the model "
                f"{name!r} has its own"
            )
    layouts = LAYOUTS if args.layout == BOTH else (args.layout or _usual_layout(),)
    found = layers.find(_load(name), layouts)
    if found.others:
        print(
            f"{name}: {found.others} quantized layers are in formats that our kernels "
            f"do not read"
        )
    if not found.problems:
        raise ValueError(
            f"the model {name!r} has no quantized linear layer in a format that our "
            f"kernels read; mlx_lm.convert -q makes them"
        )
    if args.dtype is None:
        return [*found.problems]
    return [_with_dtype(each, args.dtype) for each in found.problems]


def _with_dtype(problem: Problem, dtype: str) -> Problem:
    is_bytes = problem.format.codes == "floating"
    scales = problem.scale_dtype if is_bytes else dtype
    return replace(problem, dtype=dtype, scale_dtype=scales)


def _load(name: str) -> Any:
    try:
        return models.load(name, lazy=True)[0]
    except ValueError as error:
        raise ValueError(
            f"{name!r} is neither a shape such as 8x4096x11008 nor a model: {error}"
        ) from error


def _missing(purpose: str, error: ImportError) -> ImportError:
    return ImportError(f"{purpose} needs pip install 'mlx-marlin[lm]': {error}")


def _check_writable(place: Path) -> None:
    try:
        with tuned_results.locked(place):
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(
            f"the results cannot be kept in {place}: {error.strerror or error}"
        ) from error


def _shown(found: list[Problem]) -> Iterator[Problem]:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise _missing("the progress bar", error) from error
    yield from tqdm(found, "tune", unit="problem")


def _say(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"{text}\n")


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
