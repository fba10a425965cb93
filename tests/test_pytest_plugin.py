"""The fixture puts another project's kernels under test, races included."""

import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import metal_emulator
from support.marks import needs_emulator

pytestmark = needs_emulator

KERNEL = """
import mlx.core as mx

SOURCE = '''
threadgroup float tile[64];
uint i = thread_index_in_threadgroup;
tile[i] = x[i];
BARRIER
y[i] = tile[63 - i];
'''

def make(source):
    return mx.fast.metal_kernel("turn", ["x"], ["y"], source)

AT_IMPORT = make("y[thread_position_in_grid.x] = x[64];")

def reversed_by(barrier):
    source = SOURCE.replace("BARRIER", barrier)
    return run(make(source))

def run(kernel):
    return kernel(
        inputs=[mx.arange(64.0)], output_shapes=[(64,)], output_dtypes=[mx.float32],
        grid=(64, 1, 1), threadgroup=(64, 1, 1),
    )[0]

def test_right(emulated_metal):
    y = reversed_by("threadgroup_barrier(mem_flags::mem_threadgroup);")
    assert y.tolist() == list(range(63, -1, -1))

def test_race(emulated_metal):
    reversed_by("threadgroup_barrier(mem_flags::mem_none);")

def test_at_import(emulated_metal):
    run(AT_IMPORT)

def test_incomplete(emulated_metal):
    run(make("uint i = thread_position_in_grid.x; if (i > 3) { y[i] = x[i]; }"))

def test_not_emulated():
    run(AT_IMPORT)
"""
MESSAGES = {
    "test_race": "race between threads on byte",
    "test_at_import": "read outside buffer 'x' (256 bytes), at byte 256",
    "test_incomplete": "4 of 64 elements of output 'y' were never written",
}


def test_a_project_tests_its_kernels_with_one_fixture(tmp_path: Path) -> None:
    file = tmp_path / "test_kernel.py"
    file.write_text(KERNEL)

    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout

    parts = re.split(r"^_+ (test_\w+) _+$", told, flags=re.MULTILINE)
    failures = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "1 passed" in told
    for name, message in MESSAGES.items():
        failure = failures.pop(name)
        assert message in failure
        assert "metal_emulator/" not in failure  # none of its lines hides the message
    for name, failure in failures.items():  # stock MLX, which has no GPU here
        assert (name, "No Metal back-end" in failure) == ("test_not_emulated", True)


@pytest.mark.usefixtures("emulated_metal")
def test_in_a_test_the_kernels_of_mlx_are_emulated() -> None:
    assert mx.fast.metal_kernel is metal_emulator.metal_kernel
