"""How many of our files and functions a call of `quantized_matmul` runs."""

import os
import subprocess
import sys

import pytest

MOST_COLD = 48, 250
"""Files and functions: the first call plans, checks and builds."""
MOST_WARM = 4, 10
"""The look-up, the question whether MLX differentiates, the launch, its inputs."""

PROGRAM = """
import sys
from pathlib import Path
import mlx.core as mx
import mlx_marlin
from mlx_marlin.backends import registry

package = Path(mlx_marlin.__file__).parent
x, native = mx.zeros((3, 128)), mx.quantize(mx.zeros((64, 128)))
mlx_marlin.quantized_matmul  # imports it
registry.named("metal")
files = {"cold": set(), "warm": set()}

def call(x):
    for found in files.values():
        def note(frame, event, _):
            path = Path(frame.f_code.co_filename)
            is_import = frame.f_code.co_name == "<module>"
            if event == "call" and path.is_relative_to(package) and not is_import:
                file = path.relative_to(package).as_posix()
                found.add(file + ":" + frame.f_code.co_qualname)

        sys.setprofile(note)
        mlx_marlin.quantized_matmul(x, *native)
        sys.setprofile(None)
    return x

mx.export_function(lambda _: None, call, x)  # without a device graphs can be built
for found in files.values():
    print(*sorted(each.replace("<", "(") for each in found))
"""


ON_ONE_BACK_END = """
import sys
import mlx.core as mx
import mlx_marlin

x, native = mx.zeros((3, 128), mx.float16), mx.quantize(mx.zeros((64, 128), mx.float16))

def call(x):
    getattr(mlx_marlin, sys.argv[1])(x, *native)
    return x

mx.export_function(lambda _: None, call, x)
backends = {name.split(".")[2] for name in sys.modules if "marlin.backends." in name}
print(*sorted(backends & {"cuda", "metal"}))
"""


def printed(program: str, *arguments: str, **settings: str) -> str:
    """Returns what a program prints in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ
        | {f"MLX_MARLIN_{name}": each for name, each in settings.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize(
    ("backend", "name", "function"),
    [("metal", "M3 Max", "quantized_matmul"), ("cuda", "NVIDIA H200", "why_not")],
)
def test_a_call_imports_one_back_end(
    backend: str, name: str, function: str, device: bool
) -> None:
    # Graphs of CUDA's kernels cannot be built without a device; `why_not` plans.
    settings = {"BACKEND": backend, "DEVICE": name if device else ""}
    assert printed(ON_ONE_BACK_END, function, **settings).split() == [backend]


def test_a_call_runs_functions_of_few_files() -> None:
    settings = {"BACKEND": "metal", "DEVICE": "M3 Max", "TUNED": "0", "GUARD": "0"}
    found = printed(PROGRAM, **settings)
    cold, warm = (line.split() for line in found.splitlines())
    assert "products/matmul.py:quantized_matmul" in warm
    for functions, most in ((cold, MOST_COLD), (warm, MOST_WARM)):
        files = {name.split(":")[0] for name in functions}
        assert len(files) <= most[0], files
        assert len(functions) <= most[1], functions
