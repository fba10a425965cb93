"""How many of our files and functions a call of `quantized_matmul` runs."""

import os
import subprocess
import sys

import pytest

from benchmarks import house

MOST_COLD = 312, 49
"""Functions and files: the first call plans, asks for the verdict and builds."""
MOST_WARM = 11, 3
"""The look-up, the question whether MLX differentiates, the launch, its inputs."""

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


def test_a_call_on_a_mac_runs_few_functions_of_few_files() -> None:
    calls = house.functions_of_calls()

    assert "products/matmul.py:quantized_matmul" in calls["warm"]
    assert "guard/decisions.py:why_not" in calls["cold"]  # as on a Mac
    for name, most in (("cold", MOST_COLD), ("warm", MOST_WARM)):
        functions, files = house.counted(calls[name])
        assert (functions <= most[0], files <= most[1]) == (True, True), calls[name]
