"""Runs the tests marked `metal` on this machine's GPU, those of small kernels first.

Each file is a process of its own with a time limit, so that a submission that hangs
ends one file. A file of which no test passed, or of which the tests ran on another back
end, fails.

Usage: python -m benchmarks.metal_tests [--backend NAME] [--limit SECONDS] [FILE ...]
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import stages
from benchmarks.mac import ROOT
from mlx_marlin.backends import selection

FILES = tuple(
    f"tests/metal/test_{name}.py"
    for name in (
        *("block_kernels", "normed", "gated", "kernels"),
        *("epilogue", "invariance"),
    )
)
"""Files of tests, from kernels of one row to those with every division of the work."""
LIMIT = 300.0
"""Seconds of a file; in the emulator none takes a minute."""


def main(given: Sequence[str] | None = None) -> int:
    """Runs all files; returns 1 if one failed."""
    args = _arguments(given)
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in args.files:
            report = Path(folder) / "report.xml"
            report.unlink(missing_ok=True)
            fault = _run(file, report, args.backend, args.limit)
            print(f"== {file}: {fault or 'passed'}", flush=True)
            if fault:
                failed[file] = fault
    for file, fault in failed.items():
        print(f"::error::{file}: {fault}")
    return int(bool(failed))


def _run(file: str, report: Path, backend: str, limit: float) -> str:
    """Runs a file of tests; returns what is wrong, or ""."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-rf", "-m", "metal"),
        *("-p", "no:cacheprovider", f"--junit-xml={report}", "-n0", str(ROOT / file)),
    ]
    environment = {selection.ENVIRONMENT: backend, "CI": "1"}
    stage = stages.run(file, command, limit, environment)
    if stage.status == "timed out":
        return f"did not end in {limit:g} s"
    try:
        return fault_of(report, backend) or stage.detail
    except (OSError, ElementTree.ParseError, StopIteration):
        return f"wrote no report: {stage.detail}"


def fault_of(report: Path, backend: str) -> str:
    """Returns what a report of pytest says against its tests, or "".

    Args:
        report: XML of JUnit.
        backend: The back end that they should have run on.

    Raises:
        OSError: If there is no report.
        ElementTree.ParseError: If it is not XML.
        StopIteration: If it has no suite of tests.
    """
    suite = next(ElementTree.parse(report).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in names)
    passed = tests - failures - errors - skipped
    print(f"{passed} passed, {failures} failed, {errors} errors, {skipped} skipped")
    stated = [
        each.get("value", "")
        for each in suite.iter("property")
        if each.get("name") == "backend"
    ]
    if stated != [backend]:
        ran = stated[0] if stated else "an unknown back end"
        return f"the tests ran on {ran}, expected {backend}"
    if failures or errors:
        return f"{failures + errors} of {tests} tests failed"
    return "" if passed else f"no test ran, {skipped} were skipped"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metal_tests", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--backend", default="metal", choices=selection.BACKENDS)
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds of each file"
    )
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
