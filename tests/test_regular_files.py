"""Files that would never end, or take all memory, are refused by every reader."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metal_emulator.compiling import build
from mlx_marlin import cache, regular_files
from mlx_marlin.backends import result_files
from mlx_marlin.backends.cuda.compiling import kernel_text, preparation
from mlx_marlin.checkpoints import folder, gguf
from mlx_marlin.cli import render
from mlx_marlin.guard import verdicts
from mlx_marlin.measure import result_file
from support.limits import limited


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)  # no block of it is stored


ENDLESS = [os.mkfifo, make_device]
REFUSED: dict[str, Callable[[Path], Any]] = {
    "safetensors": folder.read_header,
    "config": folder.read_json,
    "gguf": gguf.Container,
    "result": result_file.read,
    "render": render.read,
    "check": lambda path: regular_files.check(path, 100),
}
"""Readers that raise a ValueError with the file's name."""
UNUSED: dict[str, Callable[[Path], Any]] = {
    "verdict": verdicts.read,
    "library": build._is_intact,
    "ptx": lambda path: kernel_text._has(path, b"text"),
}
"""Readers of files that can be made again: what cannot be read is not there."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


@pytest.mark.parametrize("make", [*ENDLESS, os.mkdir])
@pytest.mark.parametrize("reader", REFUSED)
def test_irregular_files_are_refused(path: Path, reader: str, make: Any) -> None:
    make(path)
    with limited(), pytest.raises(ValueError, match="expected a regular file") as error:
        REFUSED[reader](path)
    assert str(path) in str(error.value)


@pytest.mark.filterwarnings("ignore:mlx_marlin. the verdict in .* is ignored")
@pytest.mark.parametrize("make", [*ENDLESS, make_large])
@pytest.mark.parametrize("reader", UNUSED)
def test_irregular_files_of_the_cache_are_not_used(
    path: Path, reader: str, make: Any
) -> None:
    make(path)
    with limited():
        assert not UNUSED[reader](path)


@pytest.mark.parametrize("reader", ["config", "result", "render", "check"])
def test_large_files_are_refused(path: Path, reader: str) -> None:
    make_large(path)
    with limited(), pytest.raises(ValueError, match="1099511627776 bytes, expected at"):
        REFUSED[reader](path)


def test_a_socket_cannot_be_opened(path: Path) -> None:
    make_socket(path)
    with pytest.raises(OSError, match=str(path)):
        regular_files.open_file(path)


def test_a_link_to_a_regular_file_is_followed(path: Path) -> None:
    (path.parent / "blob").write_text("text")
    path.symlink_to("blob")
    assert regular_files.read(path, 4) == b"text"


@pytest.mark.parametrize("make", ENDLESS)
def test_an_irregular_file_is_not_found_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path)
    cache.make(cache.folder("kernels"))
    make(tmp_path / "kernels" / "file")
    assert cache.find("kernels", "file") is None
    with limited(), pytest.raises(PermissionError, match=r"kernels/file is a \w+, exp"):
        preparation.read("file")


def test_a_file_of_the_cache_that_is_a_link_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "root")
    path = cache.write(tmp_path / "moved", "file", b"text")
    cache.make(tmp_path / "root")
    (tmp_path / "root" / "emulator").symlink_to(path.parent)
    assert cache.find("emulator", "file") == tmp_path / "root" / "emulator" / "file"

    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.find("emulator", "file") is None


@pytest.mark.parametrize("make", [*ENDLESS, lambda path: path.symlink_to("target")])
def test_locks_and_verdicts_are_not_written_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path)
    (tmp_path / "target").write_text("precious")
    make(tmp_path / "lock")
    fields = {**dict.fromkeys(verdicts.Verdict.__slots__, "passed"), "unfinished": 0}
    started = verdicts.Verdict(**fields)
    with limited():
        with (
            pytest.raises(OSError, match="lock"),
            result_files.locked(tmp_path),
        ):
            pass
        verdicts.write(tmp_path / "lock", started)
        found = verdicts.checked(tmp_path / "lock", started, lambda: started, print)
        assert found is started
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (MemoryError(), MemoryError),  # says nothing of the file
        (RecursionError("too deep"), ValueError),
        (AttributeError("items"), ValueError),
    ],
)
def test_errors_of_decoding_are_of_the_content_but_for_lack_of_memory(
    error: Exception, seen: type[Exception]
) -> None:
    with pytest.raises(Exception) as found, regular_files.decoding():  # noqa: PT011
        raise error
    assert found.type is seen


@pytest.mark.parametrize("most", [60, regular_files.MOST_QUOTED])
def test_a_quoted_value_is_cut_with_its_length(most: int) -> None:
    assert regular_files.quoted("x" * (most - 2), most) == repr("x" * (most - 2))
    found = regular_files.quoted("x" * (most - 1), most)
    assert len(found) == most
    assert found.endswith(f"... ({most + 1} letters)")
