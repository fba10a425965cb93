"""Files of both packages' caches: who may have written them, and what is not used."""

import os
import resource
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs
import pytest

from metal_emulator import cache as of_emulator
from mlx_marlin import cache


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Gives the test a cache of its own."""
    path = tmp_path / "cache" / "mlx_marlin"
    for module in (cache, of_emulator):
        monkeypatch.setattr(module, "root", lambda: path)
    monkeypatch.setattr(of_emulator, "_replacement", None)
    return path


@dataclass(frozen=True)
class Kept:
    """How a package keeps the file `emulator/file` below the cache's root."""

    module: ModuleType
    write: Callable[[bytes], Path]
    find: Callable[[], Path | None]


@pytest.fixture(params=["mlx_marlin", "metal_emulator"])
def kept(request: pytest.FixtureRequest, root: Path) -> Kept:
    if request.param == "metal_emulator":
        store = of_emulator.store
        return Kept(
            of_emulator, lambda x: store("file", x), lambda: of_emulator.find("file")
        )
    folder = root / "emulator"
    return Kept(
        cache,
        lambda x: cache.write(folder, "file", x),
        lambda: cache.find("emulator", "file"),
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_stored_file_is_found_and_for_its_user_alone(root: Path, kept: Kept) -> None:
    assert kept.find() is None
    before = os.umask(0)
    try:
        path = kept.write(b"text")
    finally:
        os.umask(before)

    assert path == root / "emulator" / "file"
    assert path.read_bytes() == b"text"
    assert kept.find() == path
    assert mode(path) == 0o600
    assert {mode(path.parent), mode(root)} == {0o700}
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("home", ["raises", "is a name"])
def test_a_user_without_a_home_has_a_private_cache_that_is_told_once(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As versions of platformdirs answer where there is neither HOME nor a user."""

    def user_cache_dir(name: str) -> str:
        if home == "raises":
            raise RuntimeError("could not determine the home directory")
        return f"~/.cache/{name}"

    monkeypatch.setattr(platformdirs, "user_cache_dir", user_cache_dir)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(of_emulator, "_replacement", None)
    monkeypatch.setattr("metal_emulator.cache.atexit.register", lambda *_: None)

    with pytest.warns(RuntimeWarning, match="no home folder"):
        path = cache.write(cache.folder("tuned"), "file", b"text")
    kept = of_emulator.store("library", b"text")  # without a second warning

    assert cache.find("tuned", "file") == path
    assert cache.root() in kept.parents
    assert cache.root().parent == tmp_path
    assert mode(cache.root()) == 0o700


def test_a_process_waits_for_the_locks_of_a_folder_five_seconds_in_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda each: now.append(now.pop() + each))
    monkeypatch.setattr(cache, "_waited_in", set())
    cache.make(root / "verdicts")
    for name in ("a", "b", "a"):
        with (
            cache.locked(root / name),
            pytest.raises(cache.LockedError, match=f"{root}/{name} is locked by ano"),
            cache.locked(root / name),
        ):
            pass
    assert 5 <= now[0] < 5.1
    with cache.locked(root / "a"):  # it is free again
        assert (root / "a").stat().st_size == 0
    with cache.locked(root / "verdicts" / "lock") as held:
        monkeypatch.setattr("time.sleep", lambda _: held.close())
        with cache.locked(root / "verdicts" / "lock"):  # another folder is waited for
            pass


def test_folders_above_that_of_a_file_are_checked(root: Path) -> None:
    path = cache.write(root / "verdicts" / "m3", "a.json", b"{}")
    (root / "verdicts").chmod(0o770)

    assert "verdicts can be written by other users" in str(cache.why_untrusted(path))


@pytest.mark.parametrize("of", ["file", "folder", "root"])
@pytest.mark.parametrize("wrong", [0o020, 0o002])
def test_what_others_may_write_is_not_found(
    root: Path, kept: Kept, of: str, wrong: int
) -> None:
    path = kept.write(b"planted")
    place = {"file": path, "folder": path.parent, "root": root}[of]
    place.chmod(mode(place) | wrong)

    assert kept.find() is None
    assert kept.module.why_untrusted(path) == (
        f"{place} can be written by other users (mode {mode(place):04o}): run chmod "
        f"go-w {place}"
    )
    if of == "file":  # it is replaced
        assert kept.write(b"ours") == kept.find() == path
        assert (path.read_bytes(), mode(path)) == (b"ours", 0o600)


@pytest.mark.parametrize("of", ["file", "folder", "root"])
def test_what_belongs_to_another_user_is_not_found(
    root: Path, kept: Kept, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept.write(b"planted")
    place = {"file": path, "folder": path.parent, "root": root}[of]
    real = os.stat

    def planted(asked: Any, **more: Any) -> os.stat_result:
        status = real(asked, **more)
        if Path(asked) != place:
            return status
        return os.stat_result((*status[:4], os.geteuid() + 1, *status[5:]))

    monkeypatch.setattr(os, "stat", planted)

    assert kept.find() is None
    assert f"{place} belongs to the user {os.geteuid() + 1}" in str(
        kept.module.why_untrusted(path)
    )


def test_a_file_that_vanishes_while_it_is_listed_hides_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "gone"):
        cache.write(root, name, b"four")
    listed = os.scandir
    gone = [each for each in listed(root) if each.name == "gone"]
    (root / "gone").unlink()
    monkeypatch.setattr(os, "scandir", lambda place: [*gone, *listed(place)])

    assert cache.sizes(root) == [4, 4]


def test_a_full_device_names_the_file_and_keeps_the_old_one(root: Path) -> None:
    kept = cache.write(root / "tuned", "a.json", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, before[1]))
    try:
        with pytest.raises(OSError, match=f"{root}/tuned/a.json"):
            cache.write(root / "tuned", "a.json", b"four")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*(root / "tuned").iterdir()] == [kept]
    assert kept.read_bytes() == b"old"
