"""Verdicts of the guard: kept between processes, made anew where they do not hold."""

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import cache, guard, state
from mlx_marlin.backends import planner, registry, source
from mlx_marlin.backends.launch import Launch, Operand, Output, digest
from mlx_marlin.guard import checks, known_answers, verdicts
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.weights.formats import DTYPE_BYTES
from support.guard_faults import Fault
from support.guarded_calls import (
    DEVICE,
    K,
    N,
    collected,
    new_process,
    operands,
    verdict,
)
from support.marks import needs_emulator

pytestmark = needs_emulator

DYING = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
import mlx_marlin
from mlx_marlin.backends import kernels
from mlx_marlin.guard import verdicts

verdicts.folder = lambda: Path(sys.argv[1])

def ends(**_):
    os.kill(os.getpid(), int(sys.argv[3]))

class Kernel:
    compile, __call__ = staticmethod(lambda **_: None), staticmethod(lambda **_: None)

setattr(Kernel, sys.argv[2], staticmethod(ends))
kernels._factory = lambda: lambda **_: Kernel()
w = mx.quantize(mx.ones((70, 256)))
mlx_marlin.quantized_matmul(mx.ones((1, 256)), *w)
"""


def let_a_process_die(guarded: Path, phase: str, number: int) -> None:
    """Checks a kernel in a process that a signal ends while it compiles or runs it."""
    program = [sys.executable, "-c", DYING, str(guarded), phase, str(number)]
    assert subprocess.run(program, check=False).returncode == -number


def product() -> tuple[list[str], str | None]:
    """Computes a product; returns the warnings, and why our kernel does not serve."""
    x, w = mx.ones((1, K)), mx.quantize(mx.ones((N, K)))
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
    assert mx.array_equal(y, mx.quantized_matmul(x, *w))
    return messages, mlx_marlin.why_not(x, *w)


def died_once_more(guarded: Path) -> None:
    """Does to a verdict what a process does that dies in the check of its kernel."""
    (file,) = guarded.glob("*/*.json")
    verdict = verdicts.read(file)
    assert verdict is not None
    count = verdict.unfinished + 1
    verdicts.write(file, replace(verdict, state="started", unfinished=count))
    new_process()


def test_a_kernel_is_banned_after_two_processes_that_died_in_its_check(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_a_process_die(guarded, "__call__", signal.SIGKILL)
    (suspect,) = guard.verdicts_so_far()
    assert (suspect.state, suspect.unfinished) == ("started", 1)
    died_once_more(guarded)

    (message,), reason = product()
    assert verdicts.DIED in str(reason)
    assert f"{reason}. Stock MLX or another kernel serves" in message
    assert "`mlx-marlin cache --forget marlin_gemv` has it checked again" in message

    for _ in range(2):  # the ban is kept
        new_process()
        assert product()[1] == reason
    monkeypatch.setattr(verdicts, "version", lambda: "a newer one")
    new_process()
    assert product() == ([], None)


def test_a_kernel_that_is_suspected_is_checked_again_and_told(guarded: Path) -> None:
    passed = product()
    assert passed == ([], None)
    died_once_more(guarded)
    (suspect,) = guard.verdicts_so_far()
    plan = planner.choose(problem_of(1, N, K, dtype="float32"), DEVICE)
    assert guard.known_fault(plan) is None  # no verdict

    (message,), reason = product()

    assert reason is None
    assert f"{verdicts.SUSPECTED} of the kernel marlin_gemv, which may" in message
    assert (suspect.state, guard.verdicts_so_far()[0].unfinished) == ("started", 0)
    new_process()
    assert product() == passed


@pytest.mark.parametrize("state", ["", "started"])
def test_a_check_that_another_process_makes_for_long_is_not_waited_for(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being evaluated, or has ended a process, is left to that process."""
    monkeypatch.setattr(cache, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(cache, "_waited_in", set())
    new_process()
    file = tmp_path / "key.json"
    started = verdict(state="started")
    if state:
        verdicts.write(file, started)
    passed = replace(started, state="passed")
    with cache.locked(file):
        found, messages = collected(
            lambda: [
                verdicts.checked(file, started, lambda: passed, lambda _: None)
                for _ in range(2)
            ]
        )
    assert {each.state for each in found} == {"undecided" if state else "passed"}
    (message,) = messages
    assert f"{file} is locked by another process" in message
    assert verdicts.read(file) == (started if state else None)


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_what_has_ended_a_process_does_not_run_where_that_cannot_be_counted(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: Path) -> None:
        raise PermissionError("a read-only file system")

    file = tmp_path / "key.json"
    started = verdict(state="started", unfinished=deaths)
    if deaths:
        verdicts.write(file, started)
    monkeypatch.setattr(cache, "open_to_write", refuses)
    passed = replace(started, state="passed")
    found = verdicts.checked(file, started, lambda: passed, print)
    assert found.state == ("undecided" if deaths else "passed")


def test_an_interrupted_check_is_made_again(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    with monkeypatch.context() as patch:

        def interrupted(_: Any) -> str:
            raise KeyboardInterrupt

        patch.setattr(known_answers, "fault_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mlx_marlin.quantized_matmul(x, *w)
    assert guard.verdicts_so_far() == []
    assert mlx_marlin.why_not(x, *w) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 4096 bytes."),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
        RuntimeError(
            "Failed to compile kernel: a.cu.\ncatastrophic error: cannot open source "
            'file "cuda_fp16.h"'
        ),
        OSError(28, "No space left on device"),
        ImportError("libnvrtc.so.12: cannot open shared object file"),
    ],
    ids=lambda error: str(error)[:24] or "MemoryError",
)
def test_a_check_that_cannot_be_made_is_made_again_by_the_next_process(
    error: Exception, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    tried: list[Any] = []
    with monkeypatch.context() as patch:

        def fails(plan: Any) -> str:
            tried.append(plan)
            raise error

        patch.setattr(known_answers, "fault_of", fails)
        for _ in range(2):
            y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
            assert mx.array_equal(y, mx.quantized_matmul(x, *w))
            (verdict,) = guard.verdicts_so_far()
            assert verdict.state == "undecided"
            assert len(messages) == 1
            assert "could not be checked" in messages[0]
            assert "The next process checks it again" in messages[0]
            assert "could not be checked" in str(guard.known_fault(tried[-1]))
            # This process neither tries nor warns again.
            _, more = collected(lambda: mlx_marlin.quantized_matmul(x[0], *w))
            assert more == []
            new_process()
            assert guard.verdicts_so_far() == []
            assert guard.known_fault(tried[-1]) is None
    assert len(tried) == 2
    assert mlx_marlin.why_not(x, *w) is None
    assert [each.state for each in guard.verdicts_so_far()] == ["passed"]


def test_a_mistake_in_a_check_is_no_verdict_on_the_kernel(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(_: Any) -> str:
        raise ValueError("parts=(4096, 1024) do not add up to n=51")

    monkeypatch.setattr(known_answers, "fault_of", mistaken)
    x, w = operands(m=1)
    with pytest.raises(ValueError, match="do not add up"):
        mlx_marlin.quantized_matmul(x, *w)
    state.reset()
    monkeypatch.setattr(checks, "raises_mistakes", False)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert mx.array_equal(y, mx.quantized_matmul(x, *w))
    (message,) = messages
    assert "could not be checked: the check has a mistake: ValueError" in message
    assert "failed its check" not in message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "passed"}', "\x00", "null", "[" * 100000]
)
def test_a_damaged_verdict_is_made_anew(text: str, guarded: Path) -> None:
    x, w = operands(m=1)
    mlx_marlin.quantized_matmul(x, *w)
    (file,) = guarded.glob("*/*.json")
    file.write_text(text)
    new_process()
    reason, messages = collected(lambda: mlx_marlin.why_not(x, *w))
    assert reason is None
    assert [f"{file} is ignored" in each for each in messages] == [True] * bool(text)
    (verdict,) = guard.verdicts_so_far()
    assert verdict.state == "passed"


def test_where_nothing_can_be_written_each_process_checks(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.write_text("a file in the folder's place")
    fault = Fault("gemv", "zeros").plant(monkeypatch)
    x, w = operands(m=1)
    for nth in (1, 2):
        y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
        assert mx.array_equal(y, mx.quantized_matmul(x, *w))
        assert (fault.called, len(messages)) == (nth, 1)
        new_process()


TEXT = source.Source(
    name="n", input_names=("x",), output_names=("z",), header="", source=""
)
LAUNCH = Launch(
    source=TEXT,
    template=(("A", 2),),
    inputs=(Operand(name="x", dtype="float16"), Operand(name="y", dtype="float16")),
    grid=(1, 1, 1),
    threadgroup=(1, 1, 1),
    outputs=(Output("z", "float16", (1,), None),),
)


def with_dtypes(*dtypes: str) -> Launch:
    inputs = (Operand(name=f"x{i}", dtype=each) for i, each in enumerate(dtypes))
    return replace(LAUNCH, inputs=tuple(inputs))


def test_another_text_or_instance_of_a_kernel_has_no_verdict_yet() -> None:
    texts: list[dict[str, Any]] = [
        *({"name": "other"}, {"input_names": ("y",)}, {"output_names": ("y",)}),
        *({"header": "//"}, {"source": "//"}, {"atomic": True}),
    ]
    values = [((name, value),) for name in "AB" for value in (1, True, "1", 2)]
    others = [replace(LAUNCH, source=replace(TEXT, **each)) for each in texts]
    others += [replace(LAUNCH, template=each) for each in ((), *values)]
    others += [with_dtypes(*each) for each in itertools.product(DTYPE_BYTES, repeat=2)]
    digests = {digest((each,)) for each in others}
    assert len(digests) == len(others) - 1  # the variant itself is there twice
    assert digest((LAUNCH,)) in digests
    assert digest((LAUNCH, LAUNCH)) not in digests


@pytest.mark.parametrize("how", ["checked", "condemned"])
def test_kernels_that_share_their_first_have_verdicts_of_their_own(
    how: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduce kernel applies the epilogue; the product before it is the same."""
    split = {"kernel": "gemm_register", "strategy": "split_k", "k_parallel": 2}
    problem = problem_of(9, N, K)
    plain = planner.make(problem, device=DEVICE, **split)
    biased = replace(plain, problem=replace(problem, epilogue=Epilogue(bias=True)))
    first, other = (
        registry.named("metal").launches(plan)[0].instance for plan in (plain, biased)
    )
    assert first == other
    faults = {plain: None, biased: "planted"}
    monkeypatch.setattr(known_answers, "fault_of", faults.__getitem__)

    assert guard.why_not(plain) is None
    condemn: Callable[[], object] = partial(guard.condemn, biased, "planted")
    with pytest.warns(RuntimeWarning, match="planted"):
        condemn() if how == "condemned" else guard.why_not(biased)

    for _ in range(2):
        assert "planted" in str(guard.known_fault(biased))
        assert guard.known_fault(plain) is None
        new_process()


@pytest.mark.parametrize("what", ["chip", "architecture", "system", "build", "mlx"])
def test_another_machine_has_no_verdict_yet(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"device_name": "Apple M3", "architecture": "applegpu_g15g"}
    monkeypatch.setattr(mx, "is_available", lambda _: True)
    monkeypatch.setattr(mx, "device_info", lambda _: info)
    machine = verdicts._machine.__wrapped__
    before = machine("emulator")
    backend = registry.named("emulator")
    changes: dict[str, Callable[[], None]] = {
        "chip": lambda: info.update(device_name="Apple M4"),
        "architecture": lambda: info.update(architecture="applegpu_g15s"),
        "system": lambda: monkeypatch.setattr(verdicts.platform, "system", lambda: ""),
        "build": lambda: monkeypatch.setattr(backend, "system_build", lambda: "new"),
        "mlx": lambda: monkeypatch.setattr(mx, "__version__", "0.0"),
    }
    assert machine("emulator") == before

    changes[what]()

    assert machine("emulator") != before


def test_verdicts_of_other_versions_are_left_out(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    with monkeypatch.context() as patch:
        patch.setattr(source, "digest_of_shaders", lambda: "another version")
        patch.setattr(known_answers, "fault_of", lambda _: "planted")
        with pytest.warns(RuntimeWarning, match="planted"):
            mlx_marlin.quantized_matmul(x, *w)
        assert [each.fault for each in guard.verdicts_so_far()] == ["planted"]
    new_process()
    assert guard.verdicts_so_far() == []

    # A kernel that is the same in both versions is not checked again.
    with pytest.warns(RuntimeWarning, match="planted"):
        mlx_marlin.quantized_matmul(x, *w)
    new_process()
    assert [each.fault for each in guard.verdicts_so_far()] == ["planted"]


def test_the_digest_of_shaders_changes_with_each_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(source.shader_folder(), tmp_path / "shaders")
    monkeypatch.setattr(source, "shader_folder", lambda: tmp_path / "shaders")
    digest = source.digest_of_shaders.__wrapped__
    assert digest() == source.digest_of_shaders()
    for file in ("lib/work.metal", "kernels/gemv.metal", "cuda/prelude.cuh"):
        before = digest()
        changed = tmp_path / "shaders" / file
        changed.write_text(changed.read_text() + " ")
        assert digest() != before


def test_a_umask_of_groups_loses_no_verdict(
    guarded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "new" / "mlx_marlin")
    monkeypatch.setattr(verdicts, "folder", lambda: cache.root() / "verdicts")
    before = os.umask(0o002)
    try:
        x, w = operands(m=1)
        mlx_marlin.quantized_matmul(x, *w)
        (verdict,) = guard.verdicts_so_far()
        plan = planner.choose(problem_of(1, N, K), DEVICE)
        with pytest.warns(RuntimeWarning, match="wrong by hand"):
            guard.condemn(plan, "wrong by hand")
    finally:
        os.umask(before)
    assert verdict.state == "passed"
    assert [each.state for each in guard.verdicts_so_far()] == ["failed"]


def test_without_locks_verdicts_are_kept_all_the_same(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    x, w = operands(m=1)
    mlx_marlin.quantized_matmul(x, *w)
    assert [each.state for each in guard.verdicts_so_far()] == ["passed"]


def test_an_undecided_check_leaves_the_file_that_others_lock(tmp_path: Path) -> None:
    file = tmp_path / "place" / "key.json"
    started, undecided, passed = (
        verdict(state=each) for each in ("started", "undecided", "passed")
    )
    for made, kept in ((undecided, None), (passed, passed)):
        check = partial(replace, made)
        assert verdicts.checked(file, started, check, print) == made
        assert file.exists()
        assert verdicts.read(file) == kept


def test_what_is_known_of_a_kernel_is_found_without_running_it(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.choose(problem_of(3, N, K), DEVICE)
    fault = Fault("gemv", "factory raises").plant(monkeypatch)
    assert guard.known_fault(plan) is None
    assert fault.built == 0

    with pytest.warns(RuntimeWarning, match="failed its check"):
        expected = guard.why_not(plan)
    checked = fault.built

    assert expected is not None
    assert guard.known_fault(plan) == expected
    state.reset()  # as in another process
    assert guard.known_fault(plan) == expected
    assert fault.built == checked > 0


def test_a_check_in_progress_is_no_verdict_yet(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.choose(problem_of(3, N, K), DEVICE)
    seen: list[str | None] = []
    monkeypatch.setattr(
        known_answers, "fault_of", lambda plan: seen.append(guard.known_fault(plan))
    )

    assert guard.why_not(plan) is None

    assert seen == [None]


def test_a_process_that_is_killed_while_it_compiles_bans_no_kernel(
    guarded: Path,
) -> None:
    let_a_process_die(guarded, "compile", signal.SIGKILL)
    assert guard.verdicts_so_far() == []
