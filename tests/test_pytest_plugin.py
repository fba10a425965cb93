"""The fixture puts another project's kernels under test, races included."""

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

def reversed_by(barrier):
    source = SOURCE.replace("BARRIER", barrier)
    kernel = mx.fast.metal_kernel("turn", ["x"], ["y"], source)
    return kernel(
        inputs=[mx.arange(64.0)], output_shapes=[(64,)], output_dtypes=[mx.float32],
        grid=(64, 1, 1), threadgroup=(64, 1, 1),
    )[0]

def test_right(emulated_metal):
    y = reversed_by("threadgroup_barrier(mem_flags::mem_threadgroup);")
    assert y.tolist() == list(range(63, -1, -1))

def test_race(emulated_metal):
    reversed_by("threadgroup_barrier(mem_flags::mem_none);")
"""


def test_a_project_tests_its_kernels_with_one_fixture(tmp_path: Path) -> None:
    file = tmp_path / "test_kernel.py"
    file.write_text(KERNEL)

    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout

    assert "1 failed, 1 passed" in told
    assert "test_race" in told
    assert "at source line" in told or sys.platform == "darwin"


@pytest.mark.usefixtures("emulated_metal")
def test_in_a_test_the_kernels_of_mlx_are_emulated() -> None:
    assert mx.fast.metal_kernel is metal_emulator.metal_kernel
