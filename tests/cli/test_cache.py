"""`mlx-marlin cache` lists what is kept, and removes what is asked for."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from mlx_marlin import cache
from mlx_marlin.cli.main import main
from mlx_marlin.guard import verdicts

HOURS = 3600
Swap = Callable[[int, Path, Path], None]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Gives the test a cache of its own."""
    place = tmp_path / "mlx_marlin"
    monkeypatch.setattr(cache, "root", lambda: place)
    return place


def keep(name: str, file_name: str, size: int, hours: float = 0) -> Path:
    """Stores a file that was used some hours ago."""
    path = cache.write(cache.folder(name), file_name, bytes(size))
    return aged(path, hours)


def aged(path: Path, hours: float) -> Path:
    then = path.stat().st_mtime - hours * HOURS
    os.utime(path, (then, then))
    return path


@pytest.fixture
def answer(printed: Run) -> Callable[..., Any]:
    """Returns what runs the command, and returns what it prints as JSON."""
    return lambda options="": json.loads(printed(f"cache --json {options}"))


def test_folders_are_listed_with_files_sizes_and_contents(
    root: Path, printed: Run
) -> None:
    assert printed("cache") == f"{root}: nothing\n"
    keep("emulator", "a.so", 1_500_000)
    keep("emulator", "b.so", 700_000)
    keep("verdicts", "a.json", 30)

    assert printed("cache").splitlines() == [
        f"{root}:",
        "folder    files  size    rights      contents",
        "emulator      2  2.2 MB  drwx------  kernels compiled for the emulator",
        "verdicts      1  30 B    drwx------  checks of kernels on this machine",
    ]


def test_json_has_the_same_in_figures(root: Path, answer: Callable[..., Any]) -> None:
    keep("tuned", "a.json", 12)

    assert answer() == {
        "root": str(root),
        "folders": [
            {
                "name": "tuned",
                "path": str(root / "tuned"),
                "contents": "measured times of this machine",
                "files": 1,
                "bytes": 12,
                "rights": "drwx------",
                "problem": None,
            }
        ],
        "removed_files": 0,
    }


def test_a_folder_that_is_not_used_is_told_with_the_reason(
    root: Path, printed: Run
) -> None:
    keep("emulator", "a.so", 1).parent.chmod(0o777)

    reason = f"not used: {root / 'emulator'} can be written by other users (mode 0777)"
    assert reason in printed("cache")


def test_a_limit_removes_the_kernels_that_were_not_used_for_longest(
    root: Path, answer: Callable[..., Any]
) -> None:
    old = keep("emulator", "a.so", 400, hours=3)
    recent = keep("emulator", "b.so", 300, hours=1)
    older = keep("kernels", "c.cubin", 100, hours=4)
    used = keep("emulator", "d.so", 600, hours=0)
    results = keep("tuned", "a.json", 5000, hours=9)

    assert answer("--limit 1kB")["removed_files"] == 2
    assert not any(path.exists() for path in (old, older))
    assert all(path.exists() for path in (recent, used, results))
    assert answer("--limit '0.9 KB'")["removed_files"] == 0
    assert answer("--limit 899")["removed_files"] == 1
    assert used.exists()


@pytest.mark.parametrize(("limit", "is_said"), [("6200", False), ("6199", True)])
def test_a_limit_that_other_files_exceed_is_said(
    root: Path, limit: str, is_said: bool, printed: Run
) -> None:
    keep("emulator", "a.so", 600)
    keep("emulator", "b.so", 600, hours=1)
    keep("tuned", "a.json", 5000)

    said = printed(f"cache --limit {limit}")

    assert ("6.2 kB are left" in said) == is_said
    assert ("--clear NAME removes other folders" in said) == is_said


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "5 XB", "1e3", "9" * 400])
def test_a_limit_that_is_no_size_is_an_error(
    root: Path, text: str, refused: Run
) -> None:
    path = keep("emulator", "a.so", 1)

    said = f"--limit {text!r}, expected a size"
    assert said in refused("cache", f"--limit={text}")
    assert path.exists()


@pytest.mark.parametrize(
    ("options", "left"), [("--clear", []), ("--clear emulator", ["tuned"])]
)
def test_clearing_removes_one_folder_or_all(
    root: Path, options: str, left: list[str], answer: Callable[..., Any]
) -> None:
    keep("emulator", "a.so", 1)
    keep("emulator", "b.so", 1)
    keep("tuned", "a.json", 1)

    data = answer(options)

    assert [folder["name"] for folder in data["folders"]] == left
    assert data["removed_files"] == 3 - len(left)
    assert [path.name for path in root.parent.glob("mlx_marlin/*")] == left
    assert root.exists() == bool(left)  # made anew, it has the right mode


def test_clearing_what_is_not_there_names_what_is(root: Path, refused: Run) -> None:
    path = keep("tuned", "a.json", 1)

    said = "--clear '../tuned', expected a folder of the cache: tuned"
    assert said in refused("cache --clear ../tuned")
    assert path.exists()


def test_forgetting_a_kernel_removes_its_verdicts_on_all_machines(
    root: Path, printed: Run, refused: Run
) -> None:
    both, other = (
        verdicts.Verdict(
            **{name: name for name in ("fault", "example", "date", "shaders")},
            kernels=names,
            state=state,
            version=verdicts.version(),
        )
        for names, state in (
            ("marlin_gemm and marlin_reduce", "failed"),
            ("marlin_reduce_atomic", "started"),
        )
    )
    files = [verdicts.folder() / machine / "key.json" for machine in ("m3", "m4", "m5")]
    for file, verdict in zip(files, (both, both, other), strict=True):
        verdicts.write(file, verdict)

    said = "--forget 'marlin', expected a kernel with a verdict: marlin_gemm, "
    assert said + "marlin_reduce, marlin_reduce_atomic" in refused(
        "cache --forget marlin"
    )
    printed_lines = printed("cache --forget marlin_reduce").splitlines()

    assert printed_lines[0] == "verdicts removed: 2"
    assert [*map(verdicts.read, files)] == [None, None, other]


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Returns a folder outside of the cache, with names that the cache uses."""
    folder = tmp_path / "elsewhere"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.so", "b.cubin", "c.json", "deep/d.so"):
        (folder / name).write_text("text")
        aged(folder / name, hours=9)
    return folder


def content(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


COMMANDS = [
    *("cache --clear", "cache --clear tuned", "cache --clear emulator"),
    *("cache --limit 0", "cache", "tune --clear"),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["", "emulator", "kernels", "tuned", "models", "x"])
def test_folders_that_are_links_are_not_followed(
    root: Path, precious: Path, command: str, place: str
) -> None:
    before = content(precious)
    if place:
        keep("emulator", "a.so", 1)
        keep("tuned", "a.json", 1)
        if (root / place).is_dir():
            shutil.rmtree(root / place)
    (root / place).symlink_to(precious)

    main(command.split())

    assert content(precious) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["", "emulator", "tuned"])
@pytest.mark.parametrize("check", [1, 2, 3, 4, 5])
def test_what_becomes_a_link_after_a_check_of_its_owner_is_not_followed(
    root: Path, precious: Path, command: str, place: str, check: int, swap_at: Swap
) -> None:
    for name, file_name in (("emulator", "a.so"), ("tuned", "a.json")):
        shutil.copytree(keep(name, file_name, 1).parent, precious / name)
    before = content(precious)
    swap_at(check, root / place, precious)

    main(command.split())

    assert {*content(precious)} - {"tuned/lock", "lock"} == {*before}


@pytest.mark.parametrize("command", COMMANDS)
def test_links_in_a_folder_are_not_followed(
    root: Path, precious: Path, command: str
) -> None:
    before = content(precious)
    for name, file_name in (("emulator", "a.so"), ("tuned", "a.json"), ("x", "y")):
        folder = keep(name, file_name, 1).parent
        (folder / "tmplink").symlink_to(precious)
        (folder / "linked.so").symlink_to(precious / "a.so")
        (folder / "linked.json").symlink_to(precious)
        os.utime(folder / "tmplink", (0, 0), follow_symlinks=False)

    assert main(command.split()) == 0

    assert content(precious) == before


def test_clearing_removes_a_link_but_not_of_the_cache_itself(
    root: Path, precious: Path, printed: Run, refused: Run, monkeypatch: Any
) -> None:
    keep("tuned", "a.json", 1)
    (root / "emulator").symlink_to(precious)

    printed("cache --clear emulator")

    assert [path.name for path in root.iterdir()] == ["tuned"]
    shutil.rmtree(root)
    root.symlink_to(precious)
    assert f"{root} is a link, which is not followed" in refused("cache --clear")
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)  # it became one later
    with pytest.raises(OSError, match=root.name), cache.own(root):
        pass


@pytest.mark.parametrize("options", ["--clear", "--limit 0"])
def test_what_belongs_to_others_is_not_removed(
    root: Path, options: str, monkeypatch: pytest.MonkeyPatch, refused: Run
) -> None:
    path = keep("emulator", "a.so", 1)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)

    said = f"belongs to the user {path.stat().st_uid}"
    assert said in refused(f"cache {options}")
    assert path.exists()
