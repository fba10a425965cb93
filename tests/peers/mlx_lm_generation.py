"""Optimizes a small model of the mlx-lm on the path, generates and restores.

python mlx_lm_generation.py FAMILY VERSION
"""

import sys
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten

import mlx_marlin
from mlx_marlin.lm.tracing.block import TracedBlock

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def tiny(family: str) -> nn.Module:
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model: nn.Module = module.Model(
        module.ModelArgs.from_dict({"model_type": family, **SIZES})
    )
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def generated(model: nn.Module) -> list[int]:
    generate = import_module("mlx_lm.generate")
    steps = generate.generate_step(mx.array([5, 17, 42]), model, max_tokens=12)
    return [int(token) for token, _ in steps]


def main(family: str, version: str) -> None:
    assert mlx_lm.__version__ == version, mlx_lm.__version__
    model = tiny(family)
    expected = generated(model)

    mlx_marlin.optimize(model, layout="marlin", join=True, trace=True)

    assert all(isinstance(block, TracedBlock) for block in model.layers)
    assert generated(model) == expected
    assert all(block._inspection.spec is not None for block in model.layers)

    mlx_marlin.restore(model)

    stock = tiny(family)
    assert [type(each) for each in model.modules()] == [
        type(each) for each in stock.modules()
    ]
    arrays = dict(tree_flatten(model.parameters()))
    for path, array in tree_flatten(stock.parameters()):
        assert mx.array_equal(arrays[path], array), path
    print(f"{version}: traced, same tokens, restored")


if __name__ == "__main__":
    main(*sys.argv[1:])
