"""Small models of mlx-lm's families, their caches, and what they compute."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches

import mlx_marlin
from mlx_marlin.lm.tracing.block import TracedBlock
from support.models import arrays

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "num_nextn_predict_layers": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 96,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "sliding_window": 512,
    "sliding_window_pattern": None,
    "rope_scaling": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
Caches = list[Any]
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gemma3_text": {"sliding_window_pattern": 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}


def tiny(family: str, dtype: mx.Dtype = mx.float32, **options: Any) -> nn.Module:
    """Returns a small model whose norms and biases are not ones and zeros."""
    module = import_module(f"mlx_lm.models.{family}")
    given = {"model_type": family, **SIZES, **OWN_SIZES.get(family, {}), **options}
    mx.random.seed(3)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(given))
    nn.quantize(model, group_size=32, bits=4)
    for path, array in arrays(model).items():
        if path.endswith(("norm.weight", "proj.bias", "router.bias", "sinks")):
            model.load_weights(
                [(path, array + 0.2 * mx.random.normal(array.shape))], strict=False
            )
    for path, array in arrays(model).items():
        # Routers that are no linear layers start with zeros.
        is_router = path.endswith(("gate.weight", "correction_bias"))
        if is_router and array.dtype == mx.float32 and not array.any():
            noise = 0.2 * mx.random.normal(array.shape)
            model.load_weights([(path, noise)], strict=False)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


PADDING = [0, 2, 1]


def _each(
    model: nn.Module, make: Callable[[], Any], padding: list[int] | None = None
) -> Caches:
    """Returns a cache for each layer; layers without attention hold arrays."""
    return [
        make() if "self_attn" in layer else caches.ArraysCache(4, padding)
        for layer in model.layers
    ]


def one_stream(model: nn.Module) -> Caches:
    return _each(model, caches.KVCache)


def with_left_padding(model: nn.Module) -> Caches:
    return _each(model, lambda: caches.BatchKVCache(PADDING), PADDING)


def many_streams(model: nn.Module) -> Caches:
    return _each(model, Together)


class Together(caches.KVCache):
    """The cache of a batch whose streams are all at the same place."""

    batch = 3


def rotating(model: nn.Module) -> Caches:
    return _each(model, lambda: caches.RotatingKVCache(max_size=8, keep=2))


def rotating_batch(model: nn.Module) -> Caches:
    return _each(model, lambda: caches.BatchRotatingKVCache(8, PADDING), PADDING)


def quantized(model: nn.Module) -> Caches:
    return _each(model, lambda: caches.QuantizedKVCache(group_size=32, bits=8))


ALL_CACHES = [one_stream, with_left_padding, rotating, rotating_batch, quantized]


def decoded(
    model: nn.Module, make: Callable[[nn.Module], Caches], prompt: int = 11
) -> list[mx.array]:
    """Returns logits of a prompt, of a few tokens at once, and of single ones."""
    cache = make(model)
    kv = next(each for each in cache if type(each) is not caches.ArraysCache)
    of_batch = "atch" in type(kv).__name__
    batch = getattr(kv, "batch", 3 if of_batch else 1)
    mx.random.seed(5)
    tokens = mx.random.randint(0, 100, (batch, prompt + 9))
    ends = [0, prompt, prompt + 3, *range(prompt + 4, prompt + 10)]
    outputs = []
    for start, end in pairwise(ends):
        outputs.append(model(tokens[:, start:end], cache=cache))
        mx.eval(outputs[-1])
    return outputs


ALL = pytest.mark.parametrize("make", ALL_CACHES, ids=lambda make: make.__name__)


def traced(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model with blocks that are traced, which it must have."""
    mlx_marlin.optimize(model, trace=True, **options)
    blocks = [block for block in model.layers if "self_attn" in block]
    assert blocks
    assert all(isinstance(block, TracedBlock) for block in blocks)
    return model


def graphs(model: nn.Module) -> dict[Any, Any]:
    """Returns the graphs of a model's blocks.

    Blocks must share them, unless one has an MLP and the other experts.
    """
    blocks = [block for block in model.layers if "self_attn" in block]
    specs = {id(block._inspection.spec): block._inspection.spec for block in blocks}
    assert len(specs) == len({type(block.get("mlp")) for block in blocks})
    found: dict[Any, Any] = specs[id(blocks[-1]._inspection.spec)].graphs
    return found


def assert_equal(actual: list[mx.array], expected: list[mx.array]) -> None:
    for ours, own in zip(actual, expected, strict=True):
        assert ours.dtype == own.dtype
        assert mx.array_equal(ours, own)


def assert_close(actual: list[mx.array], expected: list[mx.array], most: float) -> None:
    for ours, own in zip(actual, expected, strict=True):
        assert ours.dtype == own.dtype
        ours, own = ours.astype(mx.float32), own.astype(mx.float32)
        assert mx.linalg.norm(ours - own) <= most * mx.linalg.norm(own)


WIDE_HEADS = {"head_dim": 64, "hidden_size": 256}
