"""Run by an interpreter that has the wheel and nothing else of ours: does it work?

Usage: python smoke_installed.py
"""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx

import metal_emulator
import mlx_marlin
from mlx_marlin.backends import graph, selection, source
from mlx_marlin.cli import demo

package = Path(mlx_marlin.__file__).parent
assert source.shader_folder() == package / "shaders", source.shader_folder()
assert demo.checkpoint() == package / "cli" / "demo_model", demo.checkpoint()
assert selection.backend() in ("metal", "emulator"), selection.backend()

x = mx.random.normal((8, 512))
w, scales, biases = mx.quantize(mx.random.normal((96, 512)))
for weight in ((w, scales, biases), (mlx_marlin.pack(w, scales, biases),)):
    y = mlx_marlin.quantized_matmul(x, *weight)
    error = mx.abs(y - mx.quantized_matmul(x, w, scales, biases)).max().item()
    assert error < 1e-3, error
assert graph.plans_built(), "stock MLX served the calls"
emulator = Path(metal_emulator.__file__).parent
assert emulator.parent == package.parent, emulator
assert "native code" in (emulator / "README.md").read_text(encoding="utf-8")
file = Path("installed.metal")
file.write_text(
    "constant int n [[function_constant(0)]];\n"
    "kernel void five(device int* y) { y[0] = n; }\n"
)
command = ["--grid", "1", "--output", "y=1:int32", "--constant", "n=5", "--trace"]
answer = subprocess.run(
    [sys.executable, "-m", "metal_emulator", file, *command],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
assert answer.stdout.startswith("y: int32 1, min 5, max 5"), answer.stdout
print(f"{package}: {selection.backend()} agrees with stock MLX")
