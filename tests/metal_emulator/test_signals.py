"""Signals during a launch: faults are caught, and Python's handlers run."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import EmulatorError, emulated, engine
from support.marks import needs_emulator
from support.metal_sources import FLOATS, each_thread, run
from support.processes import run_python
from support.profiles import sampled

pytestmark = needs_emulator

ENDLESS = "volatile float x = 0;\nwhile (true) { x = x + 1; }"
SERIES = """
uint i = thread_position_in_grid.x;
float v = a[i % 64];
for (int j = 0; j < 50000; ++j) { v = v * 0.5f + 1e-3f * j; }
out[i] = v;
"""
LAUNCHES = pytest.mark.parametrize(
    ("workers", "trace"), [(1, False), (3, False), (1, True), (3, True)]
)

TESTS = Path(__file__).resolve().parents[1]  # where `support` is


class StopError(Exception):
    """What a handler raises."""


@contextmanager
def alarms(
    handler: Callable[[int, FrameType | None], object], every: float = 0.005
) -> Iterator[None]:
    """Sends SIGALRM after some milliseconds in the block, and again and again."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_apart(code: str) -> str:
    """Returns what `code` prints in a process of its own."""
    answer = run_python(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{code}")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def launch(source: str) -> mx.array:
    return run(source, FLOATS, grid=512, shape=(512,))


@sampled(2)
@LAUNCHES
def test_handlers_run_during_a_launch_and_what_they_raise_ends_it(
    workers: int, trace: bool
) -> None:
    """After the launch a handler would run there once, for all signals together."""
    calls = []

    def third(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is engine.run.__code__:
            calls.append(1)
        if len(calls) == 3:
            raise StopError("the third")

    with emulated(workers=workers, trace=trace):
        with pytest.raises(EmulatorError, match="time limit"), emulated(time_limit=0.1):
            launch(ENDLESS)  # compiles it
        with pytest.raises(StopError, match="the third"), alarms(third):
            launch(ENDLESS)

    assert each_thread("1.0f").tolist() == [1] * 32


@sampled(2)
@LAUNCHES
def test_a_launch_goes_on_after_a_handler_that_returns(
    workers: int, trace: bool
) -> None:
    """Denormals of a double are not zero there, as they are not before and after."""
    calls = []
    smallest = float(np.finfo(np.float64).tiny)
    with emulated(workers=workers, trace=trace):
        expected = launch(SERIES)

        with alarms(lambda *_: calls.append(smallest / 4)):
            for _ in range(5):
                np.testing.assert_array_equal(launch(SERIES), expected)

    assert set(calls) <= {smallest / 4}


def test_ctrl_c_ends_no_launch_if_its_handler_returns() -> None:
    calls = []
    ended = threading.Event()

    def press() -> None:
        while not ended.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with (
            emulated(time_limit=0.3),
            pytest.raises(EmulatorError, match="exceeds the time limit"),
        ):
            launch(ENDLESS)
    finally:
        ended.set()
        pressing.join()
        signal.signal(signal.SIGINT, before)

    assert calls


def test_ctrl_c_interrupts_a_launch() -> None:
    with pytest.raises(EmulatorError), emulated(time_limit=0.05):
        launch(ENDLESS)  # compiles it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(ENDLESS)
    finally:
        pressing.join()
        signal.signal(signal.SIGINT, before)

    assert each_thread("1.0f").tolist() == [1] * 32


def test_a_handler_cannot_launch_a_kernel_inside_one() -> None:
    def launches(*_: object) -> None:
        each_thread("1.0f")
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    def until_one_meets_a_launch() -> None:
        with alarms(launches, every=0):
            while True:
                launch(SERIES)

    with pytest.raises(EmulatorError, match="cannot launch a kernel inside one"):
        until_one_meets_a_launch()


def test_handlers_do_not_wait_for_a_launch_of_another_thread() -> None:
    """The main thread waits for nothing then: Ctrl-C is its own."""
    code = f"""
import signal, threading
from metal_emulator import EmulatorError, emulated
from support.metal_sources import FLOATS, run

def other():
    with emulated(time_limit=1.0):
        try:
            run({ENDLESS!r}, grid=64)
        except EmulatorError as error:
            assert "time limit" in str(error), error
            print("ended", flush=True)

thread = threading.Thread(target=other)
thread.start()
calls = []
signal.signal(signal.SIGINT, lambda *_: calls.append(1))
signal.raise_signal(signal.SIGINT)
assert calls == [1]
thread.join()
"""
    assert run_apart(code) == "ended\n"


def test_faults_are_reported_where_their_signals_are_blocked() -> None:
    code = f"""
import signal
from metal_emulator import EmulatorError, emulated
from support.metal_sources import FLOATS, run

faults = (
    ("out[0] = a[100000];", "outside buffer"),
    ("out[0] = 1 << int(a[40]);", "shift by"),
    ({ENDLESS!r}, "time limit"),
)
for blocked in (signal.SIGSEGV, signal.SIGILL, signal.SIGURG):
    signal.pthread_sigmask(signal.SIG_SETMASK, [blocked])
    for workers in (1, 3):
        for source, message in faults:
            with emulated(time_limit=0.1, workers=workers):
                try:
                    run(source, FLOATS, grid=4096)
                except EmulatorError as error:
                    assert message in str(error), (blocked, workers, error)
                else:
                    raise AssertionError((blocked, workers, source))
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {{blocked}}
"""
    run_apart(code)
