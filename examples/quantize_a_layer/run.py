"""Quantizes one linear layer and computes it with this package's kernels.

Run it from the repository's root:

    python examples/quantize_a_layer/run.py
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import mlx_marlin

N, K = 256, 512
FORMAT = {"group_size": 64, "bits": 4}


def error(y: mx.array, exact: np.ndarray) -> float:
    """Returns the relative error of a result (Frobenius norm)."""
    difference = np.array(y, np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


mx.random.seed(0)
layer = nn.Linear(K, N, bias=False)
layer.set_dtype(mx.float16)
x = mx.random.normal((8, K)).astype(mx.float16)

# One weight: the functions have the signatures of MLX's.
w, scales, biases = mx.quantize(layer.weight, **FORMAT)
y = mlx_marlin.quantized_matmul(x, w, scales, biases, **FORMAT)

decoded = mx.dequantize(
    w, scales.astype(mx.float32), biases.astype(mx.float32), **FORMAT
)
exact = np.array(x, np.float64) @ np.array(decoded, np.float64).T
print(f"ours against float64:  {error(y, exact):.0e}")
print(f"ours against nn.Linear: {error(y, np.array(layer(x), np.float64)):.0e}")

# Who serves a call, and why it is not our kernel.
print("served by stock MLX:", mlx_marlin.why_not(x, w, scales, biases, **FORMAT))
left = mx.random.normal((8, N)).astype(mx.float16)
print(
    "x @ w instead of x @ w.T:",
    mlx_marlin.why_not(left, w, scales, biases, transpose=False, **FORMAT),
)

# The layer: an `nn.QuantizedLinear`, with the weight packed for our kernels.
marlin = mlx_marlin.MarlinLinear.from_linear(layer, **FORMAT, layout="marlin")
print(marlin)
print(f"the layer against float64: {error(marlin(x), exact):.0e}")
sizes = layer.weight.nbytes, marlin.words.nbytes + marlin.packed_scales.nbytes
print(f"{sizes[0]} bytes of float16, {sizes[1]} bytes packed")
