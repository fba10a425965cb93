"""Files of a native GPU compiler are read, and damaged ones refused."""

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_binary import Figures, figures, sections
from support import gpu_files
from support.gpu_files import gpu_file

FILE = gpu_file(96, 208, 4096)
REFUSED = re.compile("exceed|expected|has no|missing|damaged")
FIGURES = Figures(registers=96, spilled_bytes=208, code_bytes=4096)
OTHER = gpu_files.mach_o([("__TEXT", "__fragment", b"f" * 40)])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("registers", "spilled"), [(12, 0), (96, 208), (124, 4)])
def test_figures_are_those_that_were_written(
    registers: int, spilled: int, width: int
) -> None:
    found = figures(gpu_file(registers, spilled, 640, width))

    assert (found.registers, found.spilled_bytes) == (registers, spilled)
    assert found.code_bytes == 640


@pytest.mark.parametrize("magic", [0xCAFEBABE, 0xCBFEBABE])
def test_the_slice_with_a_kernel_is_read(magic: int) -> None:
    files = [b"MTLB" + bytes(30), OTHER, FILE]

    assert figures(gpu_files.universal(files, magic)) == FIGURES


def test_every_shortened_file_is_refused() -> None:
    kernel = sections(FILE)["__TEXT", "__compute"]
    for size in range(len(FILE)):
        with pytest.raises(ValueError, match=REFUSED):
            figures(FILE[:size])
    for size in range(0, len(kernel), 7):
        cut = gpu_files.mach_o([("__TEXT", "__compute", kernel[:size])])
        with pytest.raises(ValueError, match=REFUSED):
            figures(cut)


@given(st.lists(st.tuples(st.integers(0, len(FILE) - 1), st.binary(min_size=4))))
def test_a_damaged_file_is_refused_or_read(damage: list[tuple[int, bytes]]) -> None:
    data = bytearray(FILE)
    for at, noise in damage:
        data[at : at + len(noise)] = noise
    for each in (bytes(data), gpu_files.universal([bytes(data)] * 2)):
        try:
            found = figures(each)
        except ValueError as error:
            assert str(error)  # noqa: PT017
        else:
            assert 0 < found.registers <= 512


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "exceeds 0 bytes"),
        (b"\x7fELF" + bytes(60), "magic number"),
        (OTHER, "no section __TEXT,__compute"),
        (gpu_files.universal([b"MTLB" + bytes(9)]), "no section __TEXT,__compute"),
        (struct.pack(">2I", 0xCAFEBABE, 2**31), "2147483648 slices"),
        (
            gpu_files.mach_o([("__TEXT", "__compute", OTHER)]),
            "no section __TEXT,__text",
        ),
        (gpu_file(0, 4, 8), "registers=0, expected 1 to 512"),
        (gpu_file(60000, 4, 8), "registers=60000, expected 1 to 512"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figures(data)


def test_a_field_outside_its_table_is_refused() -> None:
    whole = gpu_files.metadata(96, 0)
    listed = struct.pack("<H", 4)  # the root's field 0
    broken = whole.replace(listed + bytes(2), struct.pack("<H", 400) + bytes(2), 1)
    kernel = gpu_files.mach_o(
        [("__TEXT", "__text", b"c"), ("__GPU_METADATA", "__compute", broken)]
    )

    with pytest.raises(ValueError, match="outside its table"):
        figures(gpu_files.mach_o([("__TEXT", "__compute", kernel)]))
