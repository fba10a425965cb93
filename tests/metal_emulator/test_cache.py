"""What takes the place of a cache of compiled kernels that cannot be used."""

import errno
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_emulator import cache
from metal_emulator.compiling import build, compiler
from support.marks import needs_emulator
from support.processes import run_python


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Gives the test a cache and a temporary folder of its own."""
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "cache" / "mlx_marlin")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(cache, "_replacement", None)
    monkeypatch.setattr(cache.atexit, "register", lambda *_: None)  # type: ignore[attr-defined]
    return tmp_path / "cache" / "mlx_marlin"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def store_elsewhere(content: bytes = b"text") -> tuple[Path, str]:
    """Stores a file which the cache does not take; returns it and the one warning."""
    with pytest.warns(RuntimeWarning) as caught:
        path = cache.store("file", content)
    assert len(caught) == 1
    assert tempfile.gettempdir() in str(path)
    assert path.read_bytes() == content
    return path, str(caught[0].message)


@pytest.mark.parametrize("of", ["folder", "root"])
def test_a_folder_that_others_may_write_is_replaced_by_a_temporary_one(
    root: Path, of: str
) -> None:
    planted = cache.store("file", b"planted")
    place = root if of == "root" else planted.parent
    place.chmod(0o777)

    path, message = store_elsewhere(b"ours")

    assert f"{place} can be written by other users" in message
    assert planted.read_bytes() == b"planted"
    assert cache.find("file") == path
    assert cache.store("more", b"").parent == path.parent


@pytest.mark.parametrize("place", ["cache", "cache/mlx_marlin"])
def test_where_no_folder_can_be_made_a_temporary_one_takes_its_place(
    root: Path, place: str
) -> None:
    file = root.parent.parent / place
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.write_text("in the way")

    path, message = store_elsewhere()

    assert f"the cache {root / 'emulator'} cannot be used: " in message
    assert f"{path.parent} replaces it" in message
    assert mode(path.parent) == 0o700


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["mkstemp", "replace"])
def test_a_cache_that_becomes_full_or_read_only_is_replaced(
    root: Path, code: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.store("first", b"1")
    module = {"mkstemp": tempfile, "replace": cache.os}[call]
    real = getattr(module, call)

    def refuse(*arguments: Any, **more: Any) -> Any:
        if str(root) in f"{arguments} {more}":
            raise OSError(code, os.strerror(code))
        return real(*arguments, **more)

    monkeypatch.setattr(module, call, refuse)

    path, message = store_elsewhere()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = cache.store("second", b"2")

    assert os.strerror(code) in message
    assert second.parent == path.parent
    assert cache.find("first") == first
    assert cache.find("second") == second
    assert [*first.parent.iterdir()] == [first]


def test_a_temporary_folder_is_removed_at_the_end(tmp_path: Path) -> None:
    program = f"""
import os, warnings
from pathlib import Path
from metal_emulator import cache
warnings.simplefilter("ignore")
cache.root = lambda: Path({str(tmp_path)!r}) / "file" / "mlx_marlin"
path = cache.store("file", b"text")
if os.fork() == 0:
    raise SystemExit  # a fork leaves the folder to its parent
os.wait()
print(path.exists(), path)
"""
    (tmp_path / "file").write_text("in the way")

    answer = run_python(program)

    existed, path = answer.stdout.split()
    assert existed == "True", answer.stderr
    assert not Path(path).parent.exists()


KERNEL = '#include "kernel.h"\nextern "C" void mslemu_kernel() { VALUE; }\n'


@needs_emulator
def test_a_planted_library_is_not_used(root: Path) -> None:
    found = compiler.find()
    assert found is not None
    planted = build.kernel_library(found, KERNEL.replace("VALUE", "1"))
    planted.parent.chmod(0o777)

    with pytest.warns(RuntimeWarning, match="can be written by other users"):
        path = build.kernel_library(found, KERNEL.replace("VALUE", "1"))

    assert path != planted
    assert path.name == planted.name
    assert build.kernel_library(found, KERNEL.replace("VALUE", "1")) == path
    assert build.kernel_library(found, KERNEL.replace("VALUE", "2")) != path
