"""The run time and a kernel compile for arm64, Linux and macOS; nothing runs here."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from mlx_marlin.emulator import build

ZIG = importlib.util.find_spec("ziglang")

pytestmark = pytest.mark.skipif(
    ZIG is None, reason="the wheel `ziglang` compiles for other machines"
)

KERNEL = """
#include "kernel.h"
void bug(const half* x, float* y, simdgroup_matrix<half, 8, 8> a) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[0] = simd_sum(float(x[0]));
  simdgroup_multiply(a, a, a);
}
"""


def compiled(target: str, folder: Path, *arguments: str) -> list[str]:
    """Compiles for another machine and returns the names of the object files."""
    zig = Path(ZIG.origin).parent / "zig"
    subprocess.run(
        [str(zig), "clang", "-target", target, *build.FLAGS, "-c", *arguments],
        cwd=folder,
        check=True,
    )
    return sorted(path.name for path in folder.glob("*.o"))


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_the_run_time_compiles_for_arm64(target: str, tmp_path: Path) -> None:
    sources = sorted((build.HERE / "runtime").glob("*.cpp"))

    objects = compiled(target, tmp_path, *map(str, sources))

    assert objects == [f"{source.stem}.o" for source in sources]


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_a_kernel_compiles_for_arm64(target: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    include = ("-I", str(build.INCLUDE), "-I", str(build.INCLUDE / "metal"))

    objects = compiled(target, tmp_path, *build.METAL_FLAGS, *include, str(source))

    assert objects == ["kernel.o"]
