"""Decisions of the guard as tables: its switch, states, reasons, files and marks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin import guard, state
from mlx_marlin.backends import kernels, planner, selection, source
from mlx_marlin.guard import checks, known_answers, verdicts
from mlx_marlin.guard.reference import KernelError
from mlx_marlin.guard.verdicts import Verdict
from mlx_marlin.planning.problem import problem_of
from support.guarded_calls import DEVICE, K, N, collected, new_process, verdict

SPLIT = {"kernel": "gemm_register", "strategy": "split_k", "k_parallel": 2}


def plan_of(m: int = 1) -> Any:
    return planner.choose(problem_of(m, N, K), DEVICE)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("missing", [None, "no device"])
def test_the_guard_is_on_where_kernels_run_on_a_gpu_or_it_is_asked_for(
    missing: str | None, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "missing", lambda: missing)
    for setting, backend in product(
        ("", "0", "1"), ("metal", "cuda", "emulator", "stock")
    ):
        monkeypatch.setenv(guard.ENVIRONMENT, setting)
        monkeypatch.setattr(selection, "backend", lambda each=backend: each)
        with kernels.deferred() if deferred else nullcontext():
            found = guard.is_on()
        runs = missing is None and not deferred and backend != "stock"
        wanted = {"0": False, "1": True, "": backend in ("metal", "cuda")}[setting]
        assert found == (runs and wanted), (setting, backend)


def raises(error: Exception, by_kernel: bool) -> Callable[[], str | None]:
    def check() -> str | None:
        if by_kernel:
            raise KernelError from error
        raise error

    return check


TRANSIENT = (
    *("out of memory", "insufficient memory", "unable to allocate"),
    *("cannot allocate memory", "no space left on device", "disk quota exceeded"),
    *("cannot open source file", "could not open source file"),
    *("cannot open shared object file", "failed to open libnvrtc"),
)


def test_what_a_check_raises_decides_about_the_kernel_or_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "raises_mistakes", False)
    found = checks._state_and_fault
    assert found(lambda: None) == ("passed", "")
    assert found(lambda: "zeros") == ("failed", "zeros")
    two = ValueError("\n  \n first of \nsecond")
    assert found(raises(two, True)) == ("failed", "ValueError: first of")
    mistake = "the check has a mistake: ValueError: first of"
    assert found(raises(two, False)) == ("undecided", mistake)
    empty = RuntimeError(" \n")
    assert found(raises(empty, True)) == ("failed", "RuntimeError: no message")
    causes: list[Exception] = [MemoryError(), OSError("x"), ImportError("x")]
    causes += [RuntimeError(f"a {each.upper()} b") for each in TRANSIENT]
    for raises_mistakes, error, by_kernel in product(
        (False, True), causes, (False, True)
    ):
        monkeypatch.setattr(checks, "raises_mistakes", raises_mistakes)
        text = f"{type(error).__name__}: {error}"
        text = text if str(error) else f"{text}no message"
        assert found(raises(error, by_kernel)) == ("undecided", text)


FAILED = (
    "mlx_marlin: the kernel a and b failed its check on this machine: zeros. Stock MLX "
    "or another kernel serves in its place, with right results. `mlx-marlin cache "
    "--forget a` has it checked again. Please report this line with the output of "
    "`mlx-marlin doctor --json` (docs/troubleshooting.md)"
)
UNDECIDED = (
    "mlx_marlin: the kernel a and b could not be checked: zeros. Stock MLX or another "
    "kernel serves in its place, with right results. The next process checks it again "
    "(docs/troubleshooting.md)"
)


def test_a_failure_is_told_once_for_each_kernel_and_says_what_to_do() -> None:
    new_process()
    table = {"passed": None, "started": verdicts.SUSPECTED, "failed": "zeros"}
    for each, failure in {**table, "undecided": "zeros"}.items():
        one = verdict(kernels="a and b", state=each, fault="zeros")
        assert one.failure == failure
        assert (checks.reason(one) is None) == (failure is None)
        assert one.names == ["a", "b"]
        found = collected(lambda told=one: (checks._warn(told), checks._warn(told)))[1]
        if each in ("failed", "undecided"):
            assert found == [FAILED if each == "failed" else UNDECIDED]
        new_process()
    counts = [
        len(
            collected(
                lambda told=name: checks._warn(verdict(kernels=told, state="failed"))
            )[1]
        )
        for name in ("a", "b", "a")
    ]
    assert counts == [1, 1, 0]
    state.reset()  # of another thread, or of the race
    again = verdict(kernels="a", state="failed")
    assert collected(lambda: checks._warn(again))[1] == []
    with pytest.raises(ValueError, match=r"state='odd' is not one of \('started', "):
        verdict(state="odd")


def test_a_condemned_plan_is_kept_with_all_that_is_told_of_it(guarded: Path) -> None:
    plan = planner.make(problem_of(9, N, K), device=DEVICE, **SPLIT)
    with pytest.warns(RuntimeWarning, match="by hand"):
        guard.condemn(plan, "by hand")
    (found,) = guard.verdicts_so_far()
    assert asdict(found) == {
        "kernels": "marlin_gemm_register and marlin_reduce",
        "state": "failed",
        "fault": "by hand",
        "example": plan.explain(),
        "date": date.today().isoformat(),
        "shaders": source.digest_of_shaders(),
        "version": verdicts.version(),
        "unfinished": 0,
    }
    (file,) = guarded.glob("*/*.json")
    assert verdicts.read(file) == found
    new_process()
    assert guard.verdicts_so_far() == [found]
    assert guard.known_fault(plan) == checks.reason(found)
    with pytest.warns(RuntimeWarning, match="by hand"):  # once in a process
        assert guard.why_not(plan) == guard.why_not(plan) == checks.reason(found)


def test_where_the_guard_is_off_nothing_is_condemned_or_known(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of()
    with pytest.warns(RuntimeWarning, match="by hand"):
        guard.condemn(plan, "by hand")
    assert "by hand" in str(guard.known_fault(plan))
    assert "by hand" in str(guard.remembered_fault(plan))
    monkeypatch.setenv(guard.ENVIRONMENT, "0")
    new_process()
    guard.condemn(plan_of(3), "by hand")
    assert guard.known_fault(plan) is guard.why_not(plan) is None
    with pytest.warns(RuntimeWarning, match="by hand"):
        assert "by hand" in str(guard.fault_of(plan))
    assert len(guard.verdicts_so_far()) == 1


def test_verdicts_of_disk_and_process_are_sorted_and_the_newest_counts(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_answers, "fault_of", lambda _: None)
    plans = [plan_of(m) for m in (33, 3, 1)]
    for plan in plans:
        guard.why_not(plan)
    with pytest.warns(RuntimeWarning, match="by hand"):
        guard.condemn(plans[0], "by hand")
    file = next(
        each
        for each in guarded.glob("*/*.json")
        if (found := verdicts.read(each)) and found.fault
    )
    file.write_text("")  # the process knows it all the same
    found = guard.verdicts_so_far()
    names = [(each.kernels, each.example) for each in found]
    assert names == sorted(names)
    assert len({*names}) == 3
    assert [each.fault for each in found if each.state == "failed"] == ["by hand"]


def test_only_passed_verdicts_hold_in_other_versions(tmp_path: Path) -> None:
    file = tmp_path / "place" / "key.json"
    for each, version in product(verdicts.STATES, (verdicts.version(), "other")):
        written = verdict(state=each, version=version, unfinished=1)
        verdicts.write(file, written)
        kept = each == "passed" or version != "other"
        assert verdicts.read(file) == (written if kept else None)
    file.write_bytes(b"")
    assert collected(lambda: verdicts.read(file)) == (None, [])
    assert collected(lambda: verdicts.read(file.with_name("none"))) == (None, [])
    file.write_text("[]")
    _, told = collected(lambda: [verdicts.read(file) for _ in range(3)])
    assert len(told) == 1
    assert told[0].startswith(f"mlx_marlin: the verdict in {file} is ignored: ")
    verdicts.write(file / "below" / "a file", verdict())  # cannot be written


def test_a_check_after_one_that_died_says_so_and_counts(tmp_path: Path) -> None:
    """The third is not made: the verdict is that of the second, failed."""
    file = tmp_path / "place" / "key.json"
    started = verdict(state="started", example="now")
    suspected: list[Verdict] = []
    during: list[Verdict | None] = []

    def check() -> Verdict:
        with kernels.evaluation():
            during.append(verdicts.read(file))
        return replace(started, state="undecided")

    def checked() -> Verdict:
        return verdicts.checked(file, started, check, suspected.append)

    assert checked().state == "undecided"
    assert (during, suspected) == ([replace(started, unfinished=1)], [])
    before = replace(started, unfinished=1, example="before")
    verdicts.write(file, before)
    assert checked().state == "undecided"
    assert (during[1:], suspected) == ([replace(started, unfinished=2)], [before])
    assert verdicts.read(file) == before  # undecided: as it was
    twice = replace(before, unfinished=2)
    verdicts.write(file, twice)
    died = replace(
        twice, state="failed", fault="the process ended during the check, twice"
    )
    assert (checked(), verdicts.read(file)) == (died, died)
    assert checked() == died
    assert (len(during), len(suspected)) == (2, 1)


def test_forgetting_a_kernel_empties_its_verdicts_on_all_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path)
    assert verdicts.stored(tmp_path / "m1") == {}
    with pytest.raises(ValueError, match=r"'b', expected .* verdict: none has one$"):
        verdicts.forget("b")
    written = {
        "m1/one": "a and b",
        "m2/two": "b",
        "m1/three": "c",
        "m1/four": "b2 and a",
    }
    for name, names in written.items():
        verdicts.write(tmp_path / f"{name}.json", verdict(kernels=names))
    verdicts.write(tmp_path / "m1" / "text.txt", verdict(kernels="d"))
    (tmp_path / "m1" / "empty.json").write_text("")
    assert {
        key: each.kernels for key, each in verdicts.stored(tmp_path / "m1").items()
    } == {
        "one": "a and b",
        "three": "c",
        "four": "b2 and a",
    }
    with pytest.raises(
        ValueError,
        match=r"^'x{180,184}\.\.\. \(302 letters\), expected .* verdict: a, b, b2, c$",
    ):
        verdicts.forget("x" * 300)
    assert verdicts.forget("b") == 2
    sizes = {name: (tmp_path / f"{name}.json").stat().st_size for name in written}
    assert [name for name, size in sizes.items() if not size] == ["m1/one", "m2/two"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("Apple M3  Max (40)", "apple-m3-max-40"), (None, "emulator")],
)
def test_the_folder_of_a_machine_begins_with_its_chip(
    name: str | None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "is_available", lambda _: name is not None)
    monkeypatch.setattr(mx, "device_info", lambda _: {"device_name": name})
    found = verdicts._machine.__wrapped__("emulator")
    chip, _, digest = found.rpartition("-")
    assert (chip, len(digest)) == (folder, 12)
    assert set(digest) <= set("0123456789abcdef")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_kernels_run_on_the_gpu_where_there_is_one(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(mx, "is_available", lambda each: asked.append(each) or has_gpu)
    assert checks._device() == mx.Device(mx.gpu if has_gpu else mx.cpu)
    assert asked == [mx.Device(mx.gpu)]
