"""What a kernel costs to compile: bytes of machine code, and the cache."""

import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from mlx_marlin import emulator
from mlx_marlin.emulator import build, compiler

pytestmark = [
    pytest.mark.skipif(
        emulator.unavailable() is not None, reason="no compiler for Metal kernels"
    ),
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


def test_a_cache_folder_is_used_and_then_asked(tmp_path: Path) -> None:
    found, text = compiler.find(), KERNEL.replace("PRODUCTS", "")

    first = build.kernel_library(found, text, folder=tmp_path)
    first.write_bytes(b"kept")

    assert first.parent == tmp_path
    assert build.kernel_library(found, text, folder=tmp_path).read_bytes() == b"kept"
