"""What a kernel costs to compile: bytes of machine code, and the cache."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from metal_emulator.compiling import build, compiler, limited
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = [
    needs_emulator,
    pytest.mark.skipif(sys.platform == "darwin", reason="reads the sizes of ELF files"),
]

KERNEL = """
#include "kernel.h"
void products(half* x, float* y) {
  simdgroup_half8x8 a;
  simdgroup_float8x8 c(0.0f);
  simdgroup_load(a, x);
  PRODUCTS
  simdgroup_store(c, y);
}
extern "C" void mslemu_kernel() { products(emu::pointer(0), emu::pointer(1)); }
"""
PRODUCT = "simdgroup_multiply_accumulate(c, a, a, c);\n"


def bytes_of_code(products: int, folder: Path, *, traced: bool) -> int:
    text = KERNEL.replace("PRODUCTS", PRODUCT * products)
    found = compiler.find()
    with build.kernel_library(found, text, traced, folder).open("rb") as stream:
        return ELFFile(stream).get_section_by_name(".text").header.sh_size


@pytest.mark.parametrize("traced", [False, True])
def test_a_matrix_product_is_a_call_and_not_a_copy(
    traced: bool, tmp_path: Path
) -> None:
    """Our kernels have a hundred of them; as copies they took most of the compile."""
    few, many = (bytes_of_code(n, tmp_path, traced=traced) for n in (2, 66))

    assert 0 < (many - few) / 64 < 40


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lists the folders in which something is compiled."""
    folders: list[Path] = []
    run = limited.run

    def listed(command: tuple[str, ...], folder: Path) -> None:
        if "-c" in command:
            folders.append(folder)
        run(command, folder)

    monkeypatch.setattr(build, "run", listed)
    return folders


def test_a_cache_folder_is_used_and_then_asked(
    tmp_path: Path, compilations: list[Path]
) -> None:
    found, text = compiler.find(), KERNEL.replace("PRODUCTS", "")

    first = build.kernel_library(found, text, folder=tmp_path)
    again = build.kernel_library(found, text, folder=tmp_path)

    assert first.parent == tmp_path
    assert again == first
    assert len(compilations) == 1
    assert [*tmp_path.iterdir()] == [first]
    assert not compilations[0].exists()


@sampled(3)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: bytes(len(content)),
        lambda content: content[:1000] + bytes(4096) + content[5096:],
        lambda content: b"no library",
    ],
    ids=["empty", "half", "one byte less", "zeros", "a zero page", "text"],
)
def test_a_damaged_library_is_built_anew(
    damage: Callable[[bytes], bytes], tmp_path: Path, compilations: list[Path]
) -> None:
    found, text = compiler.find(), KERNEL.replace("PRODUCTS", "")
    path = build.kernel_library(found, text, folder=tmp_path)
    path.write_bytes(damage(path.read_bytes()))

    again = build.kernel_library(found, text, folder=tmp_path)

    assert again == path
    assert len(compilations) == 2
    with path.open("rb") as stream:
        assert ELFFile(stream).get_section_by_name(".text").header.sh_size > 0


def test_a_library_is_marked_as_used_once_a_process(tmp_path: Path) -> None:
    found, text = compiler.find(), KERNEL.replace("PRODUCTS", "")
    path = build.kernel_library(found, text, folder=tmp_path)
    old = (1e9, 1e9)

    os.utime(path, old)
    build.kernel_library(found, text, folder=tmp_path)
    marked = path.stat().st_mtime
    os.utime(path, old)
    build.kernel_library(found, text, folder=tmp_path)

    assert marked > 1.5e9
    assert path.stat().st_mtime == 1e9


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content,
        lambda content: b"",
        # It may keep clang busy for ever, or make another kernel.
        lambda content: content[:5000] + b"\xff" + content[5001:],
        lambda content: content[:-1],
    ],
    ids=["none", "empty", "a byte", "one byte less"],
)
def test_the_header_is_compiled_once_and_anew_if_it_is_damaged(
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[Path],
) -> None:
    monkeypatch.setattr(build.cache, "root", lambda: tmp_path / "cache")
    found = compiler.find()
    texts = [KERNEL.replace("PRODUCTS", f"y[0] = {value};") for value in (1, 2, 3)]
    build.kernel_library(found, texts[0])
    (header,) = (tmp_path / "cache" / build.cache.FOLDER).glob("*.pch")
    whole = header.read_bytes()
    header.write_bytes(damage(whole))

    for text in texts[1:]:
        assert build.kernel_library(found, text).stat().st_size

    assert [*header.parent.glob("*.pch")] == [header]
    assert (header.read_bytes() == whole) or build._is_intact(header)
    assert len(compilations) == 3


def test_a_header_whose_file_was_written_anew_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[Path]
) -> None:
    monkeypatch.setattr(build.cache, "root", lambda: tmp_path / "cache")
    include = shutil.copytree(build.INCLUDE, tmp_path / "include")
    monkeypatch.setattr(build, "INCLUDE", include)
    found = compiler.find()
    build.kernel_library(found, KERNEL.replace("PRODUCTS", ""), folder=tmp_path)

    os.utime(include / build.HEADER, (1e9, 1e9))
    build.kernel_library(
        found, KERNEL.replace("PRODUCTS", "y[0] = 1;"), folder=tmp_path
    )

    assert len(compilations) == 2  # one more if clang refuses the header


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An emulator of two headers, in a folder whose path has the word `tensor`."""
    folder = tmp_path / "tensor" / "emulator"
    for name in ("include/kernel.h", "include/tensor/matmul2d.h"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(build, "HERE", folder)
    return folder


@pytest.mark.parametrize(
    ("header", "plain_changes"),
    [("include/kernel.h", True), ("include/tensor/matmul2d.h", False)],
)
def test_headers_of_tensors_concern_kernels_that_include_them(
    package: Path, header: str, plain_changes: bool
) -> None:
    digest = build._shim_digest.__wrapped__
    before = digest(False), digest(True)
    (package / header).write_text("changed")
    after = digest(False), digest(True)
    assert (after[0] != before[0]) == plain_changes
    assert after[1] != before[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#include <metal_tensor>\n", True),
        (
            "  # include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n",
            True,
        ),
        ("#include <metal_stdlib>\n// #include <metal_tensor>\n", False),
    ],
)
def test_a_kernel_with_tensors_includes_their_headers(
    text: str, expected: bool
) -> None:
    assert build.uses_tensors(text) == expected
