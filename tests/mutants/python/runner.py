"""Runs the tests of a room on mutants of its Python.

The tests are collected once. Each mutant is a forked process in which the code of one
function is replaced; a mutant outside of functions is a process of its own.
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import mlx.core as mx
import pytest
from _pytest.runner import runtestprotocol

from mutants.python.changed_import import ROOT, alone
from mutants.python.operators import Mutant
from mutants.python.rooms import Called

KEPT = ROOT / ".mutants"  # maps, results and temporary files
WAITS = 60.0  # seconds by the clock for each second of the processor
HANGS = "no end"
Act = Callable[[], object]


class Runner:
    """Runs tests in forked processes, in place of pytest's own loop over them."""

    def __init__(
        self, files: Sequence[str], act: Callable[["Runner"], None], processes: int
    ) -> None:
        self.files, self.act, self.processes = files, act, processes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Hands the collected tests to what was asked for."""
        ((_, answer),) = in_processes([(lambda: mx.ones(1).item(), 2.0)], 1)
        if answer == HANGS:
            raise pytest.UsageError("importing a test evaluates: a fork then hangs")
        self.items = {item.nodeid: item for item in session.items}
        for file in self.files:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        self.functions: dict[tuple[str, str], list[types.FunctionType]] = {}
        gc.unfreeze()
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType):
                code = each.__code__
                key = os.path.relpath(code.co_filename, ROOT), code.co_qualname
                self.functions.setdefault(key, []).append(each)
        gc.freeze()
        self.act(self)
        return True

    @functools.cached_property
    def called(self) -> Called:
        """Runs every test once and notes who calls what, until its file changes.

        Or a function gets another name: another body seldom has other callers.
        """
        tests = sorted({test.split("::")[0] for test in self.items})
        names = sorted(key for key in self.functions if key[0] in self.files)
        kept = {file: KEPT / f"{self._digest([file], names)}.json" for file in tests}
        missing = [file for file in tests if not kept[file].exists()]
        acts = [(self._noting(file), 1200.0) for file in missing]
        for number, rows in in_processes(acts, self.processes):
            if rows == HANGS:
                raise pytest.UsageError(f"{missing[number]} does not come to an end")
            kept[missing[number]].write_text(json.dumps(rows))
        found = Called(self._digest([*self.files, *tests], names))
        for file in kept.values():
            for test, seconds, places in json.loads(file.read_text()):
                found.seconds[test] = seconds
                for place in places:
                    found.tests.setdefault(place, []).append(test)
        return found

    def _digest(self, files: Sequence[str], names: object) -> str:
        """Returns a name for what is found with the contents of files."""
        chosen = sorted(test for test in self.items if test.split("::")[0] in files)
        digest = hashlib.sha256(repr((chosen, names)).encode())
        for file in files:
            digest.update((ROOT / file).read_bytes())
        return digest.hexdigest()[:16]

    def _noting(self, file: str) -> Act:
        """Returns what runs a file's tests and lists the calls of those that pass."""

        def act() -> object:
            rows = []
            memos = [
                each
                for each in gc.get_objects()
                if isinstance(each, functools._lru_cache_wrapper)
                and str(each.__module__).startswith(("mlx_marlin", "metal_emulator"))
            ]
            chosen = [test for test in self.items if test.split("::")[0] == file]
            for test, following in pairwise([*chosen, ""]):
                for memo in memos:
                    memo.cache_clear()  # else only the first caller is seen
                places: set[str] = set()
                start = sum(os.times()[:4])
                with calls_noted(places):
                    passed = self._passes(test, following)
                if passed:
                    rows.append((test, sum(os.times()[:4]) - start, sorted(places)))
            return rows

        return act

    def _passes(self, test: str, following: str) -> bool:
        item, after = self.items[test], self.items.get(following)
        return not any(x.failed for x in runtestprotocol(item, False, after))

    def first_failed(self, mutant: Mutant, tests: Sequence[str]) -> Act:
        """Returns what plants a mutant and gives the first test that fails, or ""."""

        def act() -> object:
            if not self._plant(mutant):
                return alone(mutant, tests)
            files = list(dict.fromkeys(test.split("::")[0] for test in tests))
            order = sorted(tests, key=lambda test: files.index(test.split("::")[0]))
            for test, following in pairwise([*order, ""]):
                if not self._passes(test, following):
                    return test
            return ""

        return act

    def _plant(self, mutant: Mutant) -> bool:
        """Replaces a function's code; False if that does not carry the whole change.

        Such as of one that is called at import, or has left functions that it defines.
        """
        found = self.functions.get((mutant.file, mutant.function), [])
        inner = f"{mutant.function}.<locals>."
        if mutant.place not in self.called.tests or any(
            file == mutant.file and name.startswith(inner)
            for file, name in self.functions
        ):
            return mutant.old == mutant.new
        path = ROOT / mutant.file
        source = path.read_bytes()
        if not mutant.function or not found:
            return False
        code, old = (
            _code(compile(text, str(path), "exec"), mutant.function)
            for text in (mutant.apply(source), source)
        )
        if code == old or any(
            x.__code__.co_freevars != code.co_freevars for x in found
        ):
            return mutant.old == mutant.new
        for each in found:
            each.__code__ = code
        return True


def _code(module: types.CodeType, function: str) -> types.CodeType:
    """Returns the code of a function, by its qualified name; the last of one name."""
    for name in function.split("."):
        codes = [x for x in module.co_consts if isinstance(x, types.CodeType)]
        module = next(x for x in reversed(codes) if x.co_name == name)
    return module


@contextlib.contextmanager
def calls_noted(into: set[str]) -> Iterator[None]:
    """Notes each function of the checkout that is called, and its file."""

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/m"):
            file = os.path.relpath(code.co_filename, ROOT)
            into.update((file, f"{file}:{code.co_qualname.partition('.<locals>')[0]}"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def in_processes(
    acts: Sequence[tuple[Act, float]], processes: int
) -> Iterator[tuple[int, Any]]:
    """Yields each act's number and result; `HANGS` after its limit of CPU seconds."""
    waiting = list(enumerate(acts))[::-1]
    running: dict[int, tuple[int, int, float, bytes]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            number, (act, limit) = waiting.pop()
            child, pipe = _forked(act, limit)
            running[pipe] = number, child, time.monotonic() + WAITS * limit, b""
        ready = select.select(list(running), [], [], 0.5)[0]
        for pipe, (number, child, end, sent) in list(running.items()):
            more = os.read(pipe, 1 << 20) if pipe in ready else None
            if more:
                running[pipe] = number, child, end, sent + more
            elif more == b"" or time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(pipe)
                del running[pipe]
                yield number, json.loads(sent) if sent else HANGS


def _forked(act: Act, limit: float) -> tuple[int, int]:
    """Returns the number of a process that acts, and the pipe of its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)  # else a result that nobody reads any more would be waited for
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(limit), resource.RLIM_INFINITY))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(KEPT / "temporary")
        with open(writing, "w") as pipe:
            json.dump(act(), pipe)
    finally:
        os._exit(0)
