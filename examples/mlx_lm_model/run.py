"""Runs a model of mlx-lm on this package's kernels, and restores it.

Run it from the repository's root:

    python examples/mlx_lm_model/run.py
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten

import mlx_marlin

MODEL = Path(__file__).parents[1] / "tiny_llama/model"
PROMPT = "def main():\n    parser = argparse."

model, tokenizer = mlx_lm.load(str(MODEL))
nn.quantize(model, group_size=64, bits=4)  # the checkpoint has float16 weights


def generate() -> list[int]:
    """Returns the tokens that the model writes after the prompt."""
    stream = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=8)
    return [response.token for response in stream]


def converted() -> int:
    """Returns the number of layers that run on this package's kernels."""
    layers = [layer for _, layer in model.named_modules()]
    return sum(isinstance(layer, mlx_marlin.MarlinLinear) for layer in layers)


before = dict(tree_flatten(model.parameters()))
stock = generate()
print(f"stock MLX writes {tokenizer.decode(stock)!r}")

mlx_marlin.optimize(model, layout="marlin")
ours = generate()
print(f"{converted()} converted layers write {tokenizer.decode(ours)!r}")
print("the same tokens:", ours == stock)

mlx_marlin.restore(model)
after = dict(tree_flatten(model.parameters()))
same = before.keys() == after.keys() and all(
    mx.array_equal(before[name], after[name]) for name in before
)
print(f"{converted()} converted layers after restore; the same parameters: {same}")
