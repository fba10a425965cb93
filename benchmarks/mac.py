"""Checks, tests, tunes and times this machine, and writes one result file.

`make mac` runs it; it takes at most ten minutes. On a machine without a GPU all stages
run in the emulator: then nothing is measured, and every time says that it is predicted.
A stage that fails, or that takes too long, does not end the others; the result file
has it, with what the stage had found before.

Usage: python -m benchmarks.mac [--quick] [--folder FOLDER]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import stages
from mlx_marlin.backends import selection
from mlx_marlin.measure import machine, result_file
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import Stage
from mlx_marlin.products import this_machine

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 570.0
"""Seconds of all stages together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is checked, tuned and timed.

    Attributes:
        doctor: Further arguments of `doctor`.
        tests: Files of tests.
        tuned: Shapes to tune.
        timed: Arguments of `bench`.
        formats: Arguments of `bench` for another format: one format alone does not
            tell the cost of 8x8 products from that of decoding (`calibrate`).
        staged: Arguments of `bench` that compare `gemm_staged`, and `gemm_tensor` where
            it runs, with `gemm_register`.
    """

    doctor: Sequence[str]
    tests: Sequence[str]
    tuned: Sequence[str]
    timed: Sequence[str]
    formats: Sequence[str]
    staged: Sequence[str]


WHOLE = Work(
    doctor=("--rows", "1,4,8,16"),  # 16: tensor operations serve them on M5
    tests=(
        "tests/metal/test_kernels.py",
        "tests/metal/test_epilogue.py",
        "tests/metal/test_invariance.py",
        "tests/metal/test_gemm_tensor.py",
    ),
    tuned=("4x4096x4096", "8x14336x4096", "16x4096x14336"),
    timed=(
        *("4096x4096", "14336x4096", "4096x14336", "2048x1024"),
        *("--rows", "1,2,4,8,12,16,32,64,512"),
        *("--layout", "both", "--seconds", "0.5"),
    ),
    formats=("14336x4096", "--bits", "8", "--rows", "1,8,16,32,64"),
    staged=("14336x4096", "--rows", "6,8,9,12,16,32,64"),
)
QUICK = Work(
    doctor=("--rows", "8"),
    tests=("tests/metal/test_launch.py",),
    tuned=("8x64x256", "8x96x256", "8x64x512"),
    timed=("64x256", "--rows", "8"),
    formats=("64x256", "--bits", "8", "--rows", "8"),
    staged=("64x256", "--rows", "8"),
)
LIMITS = {
    "doctor": 90.0,
    "tensor": 30.0,
    "tests": 120.0,
    "tune": 90.0,
    "bench": 180.0,
    "formats": 60.0,
    "staged": 150.0,
}
"""Seconds of each stage."""
MEASURING = ("tune", "bench", "formats", "staged")
"""Stages that write a result file."""


def main(given: Sequence[str] | None = None) -> int:
    """Runs all stages; returns 1 if one did not pass."""
    args = _arguments(given)
    with tempfile.TemporaryDirectory() as folder:
        path = run(QUICK if args.quick else WHOLE, Path(folder), args.folder)
    result = result_file.read(path)
    print(_summary(result, path))
    return int(any(stage.status != "passed" for stage in result.stages))


def run(work: Work, scratch: Path, folder: Path) -> Path:
    """Runs all stages and writes the result file after each of them.

    Args:
        work: What to do.
        scratch: An empty folder for the stages' own files.
        folder: The folder of the result file.

    Returns:
        The result file.
    """
    device = this_machine.device()
    result = ResultFile(machine=machine.facts(device), date=date.today().isoformat())
    path = folder / result.file_name
    deadline = time.monotonic() + LIMIT
    wanted = dict(commands(work, scratch))
    if result.is_paravirtual:
        result.notes.append("paravirtual device: nothing was timed")
        wanted = {name: wanted[name] for name in wanted if name not in MEASURING}
    for name, command in wanted.items():
        print(f"\n== {name}", flush=True)
        limit = min(LIMITS[name], deadline - time.monotonic())
        stage = stages.run(name, command, limit)
        stage = _add_findings(stage, scratch, result)
        result.stages.append(stage)
        print(f"== {name}: {stage.status} {stage.detail}".rstrip(), flush=True)
        result_file.write(path, result)
    return path


def commands(work: Work, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the command of each stage.

    Args:
        work: What to do.
        scratch: The folder of the stages' own files.
    """
    ours = [sys.executable, "-m", "mlx_marlin"]
    yield "doctor", [*ours, "doctor", "--check", *work.doctor]
    layout = str(scratch / "tensor.txt")
    yield "tensor", [sys.executable, "-m", "benchmarks.tensor_layout", layout]
    yield (
        "tests",
        [
            *(sys.executable, "-m", "pytest", "-qq", "-rf", "--rootdir", str(ROOT)),
            *("-p", "no:cacheprovider", f"--junit-xml={scratch / 'tests.xml'}"),
            *(str(ROOT / name) for name in work.tests),
        ],
    )
    arguments = (
        ("tune", *work.tuned),
        ("bench", *work.timed),
        ("bench", *work.formats),
        ("bench", *work.staged, "--staged"),
    )
    for name, given in zip(MEASURING, arguments, strict=True):
        yield name, [*ours, *given, "--json", str(scratch / f"{name}.json")]


def _add_findings(stage: Stage, scratch: Path, result: ResultFile) -> Stage:
    """Adds what a stage has found to the result; returns the stage with a summary."""
    try:
        if stage.name == "tests":
            return replace(stage, detail=_tests(scratch / "tests.xml"))
        if stage.name == "tensor":
            text = (scratch / "tensor.txt").read_text("utf-8")
            result.notes.extend(text.splitlines())
        if stage.name in MEASURING:
            found = result_file.read(scratch / f"{stage.name}.json")
            known = {(row.problem, row.arm, row.clock) for row in result.products}
            result.products.extend(
                row
                for row in found.products
                if (row.problem, row.arm, row.clock) not in known
            )
            result.notes.extend(found.notes)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        detail = f"{stage.detail}; nothing could be read: {error}".removeprefix("; ")
        status = "failed" if stage.status == "passed" else stage.status
        return replace(stage, status=status, detail=detail)
    return stage


def _tests(path: Path) -> str:
    """Returns the numbers of tests, and the names of those that failed."""
    suite = next(ElementTree.parse(path).iter("testsuite"))
    failed, errors, skipped = (
        int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")
    )
    passed = int(suite.get("tests", 0)) - failed - errors - skipped
    names = [
        case.get("name", "")
        for case in suite.iter("testcase")
        if {"failure", "error"} & {child.tag for child in case}
    ]
    counts = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
    return f"{counts}: {', '.join(names)}" if names else counts


def _summary(result: ResultFile, path: Path) -> str:
    lines = ["", f"written: {path}"]
    if result.is_measured:
        lines.append(
            f"Please send it: attach {path.name} to a new issue in the issue tracker "
            f"of the repository that you got this package from."
        )
    elif selection.backend() in selection.ON_GPU:
        lines.append(
            f"It has no times. Please attach {path.name} to a new issue in the issue "
            f"tracker of the repository nevertheless: it says what failed."
        )
    else:
        lines.append(
            "Nothing was measured: there is no GPU here, and every time in it is "
            "predicted. There is no need to send it."
        )
    lines.append(
        "It has the chip, its memory, versions, times and failures. It has no names of "
        "people, computers or folders. docs/measuring.md lists every field."
    )
    return "\n".join(lines)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mac", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="folder of the result file; default: the current one",
    )
    args = parser.parse_args(given)
    if not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is not a folder")
    return args


if __name__ == "__main__":
    sys.exit(main())
