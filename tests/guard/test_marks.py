"""The mark of a kernel that is evaluated: it stays only if that ends the process."""

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mlx_marlin.backends import kernels
from mlx_marlin.guard import verdicts
from support.guarded_calls import verdict
from support.marks import needs_emulator
from support.processes import run_python

pytestmark = needs_emulator


MOMENTS = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from mlx_marlin.backends import kernels
from mlx_marlin.guard import verdicts

FILES = {verdicts.__file__}
file = Path(sys.argv[1]) / "place" / "key.json"
started = verdicts.Verdict(
    kernels="k", state="started", fault="", example="e", date="d", shaders="s",
    version=verdicts.version(),
)

def check():
    for _ in range(2):
        with kernels.evaluation():
            assert b"started" in file.read_bytes()
    return replace(started, state="passed")

def lines(signals):
    "Runs a check, sends signals at new lines, and returns how many there are."
    seen = set()
    def trace(frame, event, _):
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line[0] in FILES and line not in seen:
            seen.add(line)
            if len(seen) in signals:
                os.kill(os.getpid(), signals[len(seen)])
        return trace
    sys.settrace(trace)
    try:
        verdicts.checked(file, started, check, lambda _: None)
    finally:
        sys.settrace(None)
    return len(seen)

def end_of_a_process(signals):
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(status)
    try:
        lines(signals)
    except KeyboardInterrupt:
        os._exit(1)
    os._exit(0)

lines({})
assert verdicts.read(file).state == "passed"
file.write_bytes(b"")
total = lines({})
for nth in range(20):
    before = b"" if nth % 2 else verdicts._text(replace(started, unfinished=1))
    at = 1 + nth * (total - 2) // 19
    for signals, end in (
        ({at: signal.SIGTERM}, -signal.SIGTERM),
        ({at + 1: signal.SIGHUP}, -signal.SIGHUP),
        ({min(at + 2, total): signal.SIGUSR1}, -signal.SIGUSR1),
        ({at: signal.SIGINT, at + 1 + nth: signal.SIGINT}, 1),
    ):
        file.write_bytes(before)
        assert end_of_a_process(signals) == end, (at, signals)
        left = file.read_bytes()
        assert left in (b"", before) or b"passed" in left, (at, signals, left)
        print(at, left == before or b"passed" in left)
"""


def test_signals_leave_no_mark_at_any_of_twenty_moments(tmp_path: Path) -> None:
    """Moments are lines of a check, from before the mark until after the verdict."""
    program = [sys.executable, "-c", MOMENTS, str(tmp_path)]
    answer = subprocess.run(program, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    moments = [line.split() for line in answer.stdout.splitlines()]
    assert len({at for at, _ in moments}) == 20
    # What an earlier process has left is lost only while a verdict replaces it.
    assert sum(kept == "False" for _, kept in moments) <= 3


def test_a_thread_that_ends_with_the_interpreter_leaves_no_mark(
    tmp_path: Path,
) -> None:
    program = f"""
import threading
from mlx_marlin.guard import verdicts
file = open({str(tmp_path / "key")!r}, "w+b")
entered = threading.Event()
def evaluates():
    with verdicts.Mark(file, b"started", b"").present():
        entered.set()
        threading.Event().wait()
threading.Thread(target=evaluates, daemon=True).start()
entered.wait()
assert open(file.name).read() == "started"
"""
    assert run_python(program).returncode == 0
    assert (tmp_path / "key").read_bytes() == b""


def test_a_check_changes_no_handler_and_calls_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    path = tmp_path / "key"
    before = signal.signal(
        signal.SIGTERM,
        lambda number, frame: called.append((number, frame, path.read_bytes())),
    )
    try:
        known = [signal.getsignal(each) for each in verdicts.ENDING]
        with path.open("w+b") as file, verdicts.Mark(file, b"started", b"").present():
            signal.raise_signal(signal.SIGTERM)
            ((number, frame, content),) = called
            assert (number, content) == (signal.SIGTERM, b"")
            assert isinstance(frame, FrameType)
            assert path.read_bytes() == b"started"
        assert [signal.getsignal(each) for each in verdicts.ENDING] == known
    finally:
        signal.signal(signal.SIGTERM, before)
    assert path.read_bytes() == b""


def test_a_full_device_does_not_lose_that_a_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "key.json"
    died = verdict(state="started", unfinished=1)
    verdicts.write(file, died)
    seen = []

    def check() -> verdicts.Verdict:
        with kernels.evaluation():
            seen.append(verdicts.read(file))
        return replace(died, state="passed")

    monkeypatch.setattr(os, "pwrite", full)
    assert verdicts.checked(file, died, check, lambda _: None).state == "passed"
    assert [*seen, verdicts.read(file)] == [died, died]


def test_a_mark_is_written_shorter_and_longer_and_taken_back_by_its_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"a long text of before")
    with path.open("r+b") as file:
        mark = verdicts.Mark(file, b"begun", b"before")
        with mark.present():
            assert path.read_bytes() == b"begun"
            assert [*verdicts._present] == [mark]
        assert (path.read_bytes(), [*verdicts._present]) == (b"before", [])
        mark.put()
        with monkeypatch.context() as patch:
            patch.setattr(verdicts.os, "getpid", lambda: -1)  # a forked child
            mark.take_back()
        assert (path.read_bytes(), [*verdicts._present]) == (b"begun", [])
        mark.put()
        verdicts._end()
        assert (path.read_bytes(), [*verdicts._present]) == (b"before", [])
        with pytest.raises(KeyError), mark.present():
            raise KeyError
        assert path.read_bytes() == b"before"
    with mark.present():  # of a closed file
        pass


def test_a_check_takes_the_signals_that_end_a_process_in_the_main_thread_only(
    tmp_path: Path,
) -> None:
    """Those that are ignored stay so."""
    names = "SIGINT SIGTERM SIGHUP SIGQUIT SIGXCPU SIGALRM SIGUSR1 SIGUSR2"
    numbers = [getattr(signal, name) for name in names.split()]
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        known = {number: signal.getsignal(number) for number in numbers}
        with (tmp_path / "key").open("w+b") as file:
            mark = verdicts.Mark(file, b"begun", b"")
            other = verdicts.Mark(file, b"begun", b"")
            seen: list[Any] = []

            def elsewhere() -> None:
                with mark.present():
                    seen.extend(signal.getsignal(number) for number in numbers)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert seen == [known[number] for number in numbers]
            with mark.present(), other.present():
                taken = [
                    each
                    for each in numbers
                    if signal.getsignal(each) is verdicts._take_all_back
                ]
            assert taken == [each for each in numbers if each != signal.SIGHUP]
            assert {each: signal.getsignal(each) for each in numbers} == known
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
