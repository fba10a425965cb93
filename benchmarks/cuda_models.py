"""Models with random quantized weights, of shapes that people run.

All layers have one format, also those for which mlx-lm would keep more bits, such as
what chooses experts.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from cuda_weights import Format, Native, random_native
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

Draw = Callable[[Format, int, int], Native]
Sizes = dict[str, Any]
"""A model's arguments, as mlx-lm names them."""

LLAMA_8B: Sizes = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_8B: Sizes = {
    **LLAMA_8B,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
MODELS: dict[str, Sizes] = {
    "llama-8b": LLAMA_8B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": {
        **QWEN3_8B,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        **LLAMA_8B,
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
    },
}
TINY: Sizes = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 320,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def tiny(sizes: Sizes) -> Sizes:
    """Returns a model of the same kind that any machine runs."""
    return {name: TINY.get(name, size) for name, size in sizes.items()}


def asked_sizes(description: str | None) -> Sizes:
    """Returns the arguments of the model that `--model` and `--smoke` choose.

    Args:
        description: What the script does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    asked = parser.parse_args()
    sizes = MODELS[asked.model]
    return tiny(sizes) if asked.smoke else sizes


def quantized_model(
    sizes: Sizes, format: Format, draw: Draw = random_native
) -> nn.Module:
    """Returns a quantized model, the same for the same arguments.

    Args:
        sizes: Its arguments.
        format: Of all its linear layers, its experts and its embedding.
        draw: What makes a weight of a format, n and k.
    """
    mx.random.seed(0)
    model = _layers(sizes, format)
    quantized = nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear
    for _, layer in model.named_modules():
        if not isinstance(layer, quantized):
            continue
        *experts, n, groups = layer.scales.shape
        rows = n * (experts[0] if experts else 1)
        drawn = draw(format, rows, groups * format.group_size)
        layer.weight, layer.scales, layer.biases = (
            each if each is None or not experts else each.reshape(*experts, n, -1)
            for each in drawn
        )
        mx.eval(layer.parameters())
    model.set_dtype(format.type)
    mx.eval(model.parameters())
    return model


def of_same_arrays(model: nn.Module, sizes: Sizes, format: Format) -> nn.Module:
    """Returns another such model that has a model's arrays, not copies of them."""
    other = _layers(sizes, format)
    other.update(model.parameters())
    return other


def _layers(sizes: Sizes, format: Format) -> nn.Module:
    """Returns a model whose arrays nobody has computed: others take their place."""
    module = import_module(f"mlx_lm.models.{sizes['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(sizes))
    nn.quantize(model, format.group_size, format.bits)
    model.eval()
    return model
