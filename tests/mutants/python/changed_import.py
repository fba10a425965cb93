"""Runs tests in a process that imports one changed file: see `runner.alone`.

A file of its own: nothing of the package may be imported before the change.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path

import pytest

from mutants.python.operators import Mutant

ROOT = Path(__file__).parents[3]


class Chosen:
    """Leaves the asked tests, after the profile's own choice."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests that were asked for, each of which must be there."""
        items[:] = [item for item in items if item.nodeid in self.tests]
        missing = {*self.tests} - {item.nodeid for item in items}
        if missing:
            raise pytest.UsageError(f"no such tests: {sorted(missing)}")


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
