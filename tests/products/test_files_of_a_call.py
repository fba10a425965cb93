"""How many of our files a call of `quantized_matmul` passes through."""

import os
import subprocess
import sys

MOST_COLD = 46
"""The first call plans, checks and builds; every file of these has a step of it."""
MOST_WARM = 4
"""The look-up, the question whether MLX differentiates, the launch, its inputs."""

PROGRAM = """
import sys
from pathlib import Path
import mlx.core as mx
import mlx_marlin

package = Path(mlx_marlin.__file__).parent
x, native = mx.zeros((3, 128)), mx.quantize(mx.zeros((64, 128)))
mlx_marlin.quantized_matmul  # imports it
files = {"cold": set(), "warm": set()}

def call(x):
    for found in files.values():
        def note(frame, event, _):
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(package):
                found.add(path.relative_to(package).as_posix())

        sys.setprofile(note)
        mlx_marlin.quantized_matmul(x, *native)
        sys.setprofile(None)
    return x

mx.export_function(lambda _: None, call, x)  # without a device graphs can be built
for found in files.values():
    print(*sorted(found))
"""


def test_a_call_runs_functions_of_few_files() -> None:
    settings = {
        "MLX_MARLIN_BACKEND": "metal",
        "MLX_MARLIN_DEVICE": "M3 Max",
        "MLX_MARLIN_TUNED": "0",
        "MLX_MARLIN_GUARD": "0",
    }
    program = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(
        program,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    cold, warm = (line.split() for line in run.stdout.splitlines())
    assert "products/matmul.py" in warm
    assert len(warm) <= MOST_WARM, warm
    assert len(cold) <= MOST_COLD, cold
