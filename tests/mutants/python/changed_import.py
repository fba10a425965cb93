"""Runs tests in a process that imports one changed file.

A file of its own: nothing of the package may be imported before the change.
"""

import importlib.machinery
import json
import os
import resource
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from mutants.python.operators import Mutant

ROOT = Path(__file__).parents[3]
START = 30  # CPU seconds for importing and collecting


def alone(mutant: Mutant, tests: Sequence[str]) -> str:
    """Runs tests in a process that imports the changed file; "" if all or none pass."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (soft + START, hard))
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-m", "mutants.python.changed_import"],
        input=json.dumps([asdict(mutant), list(tests)]),
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    silent = 0, pytest.ExitCode.NO_TESTS_COLLECTED
    return "" if done.returncode in silent else f"pytest ends with {done.returncode}"


class Chosen:
    """Leaves the asked tests, after the profile's own choice."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests; all cases of one whose parameters the change renames."""
        missing = {*self.tests} - {item.nodeid for item in items}
        renamed = {test.split("[")[0] for test in missing}
        items[:] = [
            item
            for item in items
            if item.nodeid in self.tests or item.nodeid.split("[")[0] in renamed
        ]


def main() -> int:
    """Reads a mutant and its tests from standard input."""
    fields, tests = json.load(sys.stdin)
    mutant = Mutant(**fields)
    path = ROOT / mutant.file
    own = importlib.machinery.SourceFileLoader.get_code

    def changed(
        loader: importlib.machinery.SourceFileLoader, name: str
    ) -> types.CodeType | None:
        if Path(loader.path) == path:
            return compile(mutant.apply(path.read_bytes()), loader.path, "exec")
        return own(loader, name)

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign]
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    return pytest.main([*options, *files], plugins=[Chosen(tests)])


if __name__ == "__main__":
    sys.exit(main())
