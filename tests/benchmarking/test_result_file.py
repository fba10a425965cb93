"""Result files are read as written; hostile ones are refused; nothing is personal."""

import getpass
import json
import platform
import pwd
import subprocess
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from mlx_marlin.backends import measured_results, planner, selection
from mlx_marlin.evidence.codec import encoded
from mlx_marlin.measure import machine, privacy, result_file
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import Stage
from mlx_marlin.planning.measurement import Machine
from mlx_marlin.planning.problem import problem_of
from support.benchmark_rows import M3_MAX, mac_file, result_files
from support.profiles import drawn


def refused(text: str, folder: Path) -> str | None:
    """Returns the message of the ValueError that reading raises, or None."""
    try:
        read_text(text, folder)
    except ValueError as error:
        return str(error)
    return None


def read_text(text: str, folder: Path) -> ResultFile:
    path = folder / "given.json"
    path.write_text(text, encoding="utf-8")
    return result_file.read(path)


@drawn(33, result=result_files())
def test_what_is_written_is_read(
    result: ResultFile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("results") / "file.json"

    result_file.write(path, result)

    read = result_file.read(path)
    assert result_file.text(read) == result_file.text(result)
    assert read.machine == result.machine
    for actual, expected in zip(read.products, result.products, strict=True):
        assert actual.problem == expected.problem
        assert actual.plan == expected.plan
        assert actual.timing.seconds == pytest.approx(expected.timing.seconds, rel=1e-5)


def test_rows_of_models_are_read(tmp_path: Path) -> None:
    result = mac_file()

    read = read_text(result_file.text(result), tmp_path)

    assert read.generation == result.generation
    assert read.first_tokens == result.first_tokens
    assert (read.stages, read.notes) == (result.stages, result.notes)
    assert read.generation[0].generation_rate == pytest.approx(2 / 0.02)
    assert read.generation[0].prompt_rate == pytest.approx(2 * 128 / 0.4)


def test_unusual_names_are_written_so_that_they_are_read(tmp_path: Path) -> None:
    result = mac_file()
    model = replace(result.generation[0], model="Käse & <Co> 4-bit")
    facts = replace(result.machine, system="Linux 6.1@home|x", chip="x" * 500)

    text = result_file.text(replace(result, machine=facts, generation=[model]))
    read = read_text(text, tmp_path)

    assert read.generation[0].model == "K-se - -Co- 4-bit"
    assert read.machine.system == "Linux 6.1-home-x"
    assert read.machine.chip == "x" * 120


def test_a_file_says_whether_it_was_measured() -> None:
    measured = mac_file()
    guessed = replace(
        measured.products[0],
        timing=replace(measured.products[0].timing, method="cost model"),
    )

    assert measured.is_measured
    assert json.loads(result_file.text(measured))["source"] == "measured"
    mixed = replace(measured, products=[*measured.products, guessed])
    assert not mixed.is_measured
    assert json.loads(result_file.text(mixed))["source"] == "predicted"
    assert not ResultFile(machine=measured.machine, date="2026-11-24").is_measured


def test_a_file_is_named_by_chip_and_day() -> None:
    assert mac_file().file_name == "mlx-marlin-apple-m3-max-2026-11-24.json"


def test_a_plan_with_fewer_threadgroups_is_read(tmp_path: Path) -> None:
    data = json.loads(result_file.text(mac_file()))
    data["products"][0]["plan"] = stripe_with(40)

    read = read_text(json.dumps(data), tmp_path).products[0].plan

    assert read is not None
    assert read.work.threadgroups == 40


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    result_file.write(path, mac_file())
    before = path.read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        result_file.write(path, replace(mac_file(), date="2026-11-25"))

    assert path.read_text() == before


def stripe_with(threadgroups: int) -> dict[str, Any]:
    """Returns the object of a plan for 8 rows of 4096→14336."""
    problem = problem_of(8, 14336, 4096)
    plan = encoded(planner.make(problem, device=M3_MAX, strategy="stripe"))
    plan["work"]["threadgroups"] = threadgroups
    return {name: plan[name] for name in plan if name != "problem"}


GONE = object()
WRONG: tuple[tuple[str, object, str], ...] = (
    ("schema", "other", ""),
    ("version", 1, ""),
    ("machine", GONE, ""),
    ("extra", 1, ""),
    ("machine.user", "me", ""),
    ("machine.cores", "40", "the file.machine.cores"),
    ("machine.cores", True, "the file.machine.cores"),
    ("date", "2026-13-01", ""),
    ("date", "20261124", ""),
    ("products", {}, ""),
    ("products.0", 3, ""),
    ("products.0.timing.seconds", -1, ""),
    ("products.0.timing.seconds", 0, ""),
    ("products.0.timing.seconds", "1", ""),
    ("products.0.timing.seconds", 10**400, ""),
    ("products.1.timing.samples", 1.5, "the file.products[1].timing.samples"),
    ("products.0.timing.method", "guess", ""),
    ("source", "predicted", ""),
    ("products.0.clock", "wall", ""),
    ("products.0.problem.k", 7, ""),
    ("products.0.plan.problem", encoded(problem_of(8, 14336, 4096)), ""),
    ("products.0.plan", stripe_with(28_673), ""),  # more than there are k tiles
    ("products.0.plan", [], ""),
    ("products.0.plan", {}, ""),
    ("products.0.plan", GONE, "the file.products[0] has no 'plan'"),
    ("products.0.plan.kernel", "nothing", ""),
    ("products.0.plan.work.threadgroups", 10**9, ""),
    ("generation.0.step.x", 1, ""),
    ("generation.0.step.seconds", 0, "the file.generation[0].step: seconds"),
    ("stages.0.status", "fine", "the file.stages[0]: status="),
    ("notes.0", None, ""),
)
"""A field, its value, and how a refusal names it, where that is more than its name."""


@pytest.mark.parametrize(("field", "value", "place"), WRONG)
def test_a_wrong_field_is_refused(
    field: str, value: object, place: str, tmp_path: Path
) -> None:
    data = json.loads(result_file.text(mac_file()))
    *path, last = (int(key) if key.isdecimal() else key for key in field.split("."))
    inner = reduce(getitem, path, data)
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value

    with pytest.raises(ValueError, match=r"given\.json is not a result") as caught:
        read_text(json.dumps(data), tmp_path)

    assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"a": NaN}', "\ufeff{}"],
    ids=lambda text: text[:5],
)
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a result file"):
        read_text(text, tmp_path)


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    text = result_file.text(mac_file()).replace('"drift": 0.0', '"drift": NaN', 1)

    with pytest.raises(ValueError, match="NaN is not a number"):
        read_text(text, tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ValueError, match="is not a result file"):
        result_file.read(path)


def test_a_huge_file_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_file, "MOST_BYTES", 100)
    monkeypatch.setattr(json, "loads", None)

    with pytest.raises(ValueError, match="expected at most 100"):
        read_text(" " * 101, tmp_path)


@drawn(
    33,
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["schema", "version", "machine", "products", "problem"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ),
    key=st.sampled_from(
        ["machine", "date", "stages", "products", "generation", "first_tokens", "notes"]
    ),
)
def test_any_value_of_a_field_is_read_or_refused(
    data: Any, key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = json.loads(result_file.text(mac_file())) | {key: data}
    folder = tmp_path_factory.mktemp("results")

    refusal = refused(json.dumps(whole), folder)

    if refusal is None:
        assert not getattr(result_file.read(folder / "given.json"), key)
    else:
        assert "is not a result file" in refusal


PERSONAL = ("sally", "sallys-mac-studio", "/Users/sally", "Projects")


@pytest.fixture
def sally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this the computer of a person with a name."""
    monkeypatch.setattr(getpass, "getuser", lambda: "sally")
    monkeypatch.setattr(platform, "node", lambda: "sallys-mac-studio.local")
    monkeypatch.setenv("HOME", "/Users/sally")


def test_failures_are_kept_without_names_and_paths(sally: None) -> None:
    detail = (
        "exit status 2: mlx-marlin: error: /Users/sally/Projects/x.json: Permission "
        "denied for Sally on sallys-mac-studio (see ~/Projects/log, host "
        "sallys-mac-studio.local)\x1b[0m <b>"
    )
    result = replace(
        mac_file(),
        stages=[Stage(name="bench", status="failed", detail=detail)],
        notes=[detail],
    )

    text = result_file.text(result)

    for name in PERSONAL:
        assert name.lower() not in text.lower()
    for kept in json.loads(text)["stages"][0]["detail"], json.loads(text)["notes"][0]:
        assert kept.startswith("exit status 2: mlx-marlin: error: PATH: Permission")
        assert "denied for USER on HOST (see PATH, host HOST)" in kept


@pytest.mark.parametrize(
    "text",
    [
        "12.5 us / 30.1 us, 300 GB/s",
        "8 rows of 4096→14336, affine 4-bit, group 64",
        "35 passed, 0 failed: test_a[gemv-1]",
    ],
)
def test_other_text_is_kept(sally: None, text: str) -> None:
    assert privacy.redacted(text) == text


def test_a_home_folder_with_a_space_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/Sally Smith")

    assert privacy.redacted("no /Users/Sally Smith/a.json here") == "no PATH here"


def test_text_of_a_user_without_a_home_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)

    assert privacy.redacted("about ~300 GB/s") == "about ~300 GB/s"


def test_a_long_message_is_cut() -> None:
    assert len(privacy.redacted("word " * 1000)) == privacy.LONGEST


@pytest.mark.parametrize(
    ("backend", "memory"), [("metal", 36), ("cuda", 36), ("emulator", 0), ("stock", 0)]
)
def test_a_machine_is_described_with_the_memory_of_its_gpu(
    backend: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "backend", lambda: backend)
    active = SimpleNamespace(system_build=lambda: "25A354")
    monkeypatch.setattr(selection, "active", lambda: active)
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 36 * 2**30 - 9})
    fields = dict.fromkeys(("chip", "architecture", "system", "mlx", "kernels"), "x")
    here = Machine(**fields, cores=40)
    monkeypatch.setattr(measured_results, "machine", lambda *_: here)

    found = machine.facts(M3_MAX)

    assert {**asdict(found)}.items() >= asdict(here).items()
    assert (found.memory_gb, found.build, found.backend) == (memory, "25A354", backend)
    assert found.python == platform.python_version()
    assert found.commit == machine.commit()


def test_the_commit_is_that_of_the_package_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "own/measure/machine.py"))
    assert machine.commit() == ""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for step in ("init", "commit --allow-empty -m first"):
        subprocess.run([*git, *step.split()], check=True, capture_output=True)

    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
    assert len(machine.commit()) >= 7
    assert done.stdout.decode().startswith(machine.commit())
