"""The processes that compile ahead, and the bar that is shown meanwhile."""

import pickle
import signal
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from mlx_marlin import progress
from mlx_marlin.backends import children
from mlx_marlin.backends.children import EndedError, Job
from mlx_marlin.backends.cuda.compiling import ahead
from race.conftest import SimulatedMac
from race.test_race import layer
from support.models import Layers

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_an_interrupt_of_a_race_ends_its_processes(mac: SimulatedMac) -> None:
    mac.interrupted_after = 1
    process = children.start(SLEEP)

    mac.optimize(Layers(layer()), layout="mlx")

    assert process.wait(timeout=10) == -signal.SIGKILL


def test_who_waits_for_an_ended_process_is_told_that_it_was_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, has_started, raised = children.start, Event(), []

    def started(*given: Any, **options: Any) -> children.Process:
        process = own(*given, **options)
        has_started.set()
        return process

    def wait() -> None:
        with pytest.raises(EndedError) as caught:
            children.run(SLEEP, b"")
        raised.append(caught.type)

    monkeypatch.setattr(children, "start", started)
    waiting = Thread(target=wait)
    waiting.start()
    assert has_started.wait(10)
    children.end_all()
    waiting.join(10)

    assert raised == [EndedError]
    assert not children._running


class Bar:
    """A bar that counts how often it was drawn."""

    def __init__(self, disable: bool) -> None:
        self.disable, self.drawn = disable, 0

    def refresh(self) -> None:
        self.drawn += 1

    def close(self) -> None:
        pass


class CountedTime(Event):
    """An event that never waits, and comes after some seconds of a counted clock."""

    now, end = 0.0, 9.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += timeout
        return self.now >= self.end


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_bar_moves_each_three_seconds_whatever_the_work_does(
    is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Bar(disable=not is_shown)
    monkeypatch.setattr(progress, "bar", lambda *_, **__: drawn)
    monkeypatch.setattr(progress, "Event", CountedTime)
    with progress.Stages("step") as stages:
        if is_shown:
            stages._ticker.join(10)

    assert (drawn.drawn >= CountedTime.end / 3 - 1) == is_shown
    assert not stages._ticker.is_alive()


def test_what_was_compiled_is_published_with_machine_code_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir()
    shared.mkdir()
    (shared / "old.ptx").write_text("others'")
    (private / "linked.ptx").symlink_to(shared / "old.ptx")
    for name in ("a.ptx", "b.txt", "a.txt", "b.ptx", "old.ptx", ahead.JOB):
        (private / name).write_text("own")
    moved, own = [], Path.replace

    def replaced(file: Path, target: Path) -> Path:
        assert not (shared / "mark").exists()
        moved.append(file.name)
        return own(file, target)

    monkeypatch.setattr(Path, "replace", replaced)
    ahead.publish(private, shared, "mark")

    assert {*moved[:2]} == {"a.txt", "b.txt"}
    assert {*moved[2:]} == {"a.ptx", "b.ptx"}
    assert (shared / "old.ptx").read_text() == "others'"
    assert {*moved, "old.ptx", "mark"} == {each.name for each in shared.iterdir()}


def test_a_job_that_fails_leaves_neither_mark_nor_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    job = Job(name="n", module="no_such_module", argument=b"")
    (private / ahead.JOB).write_bytes(pickle.dumps(job))
    monkeypatch.setattr(ahead.os, "nice", lambda by: by)

    with pytest.raises(ModuleNotFoundError):
        ahead.main(private, tmp_path)

    assert [*tmp_path.iterdir()] == []
