"""Tiny random models of mlx-lm's architectures, each in two formats."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models import arrays

VOCABULARY = 100
WINDOW = 8
"""Width of sliding windows: a prompt of 9 tokens is longer."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": WINDOW,
}
ROUTED: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CHOSEN_BY_SIGMOIDS: dict[str, Any] = ROUTED | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
INT4, INT4_WIDE = ("affine", 4, 32), ("affine", 4, 64)
INT3, INT6, INT8 = ("affine", 3, 32), ("affine", 6, 64), ("affine", 8, 64)
MXFP4, MXFP8, NVFP4 = ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A module of `mlx_lm.models` and a configuration of its model."""

    family: str  # Name of the module
    # Mode, bits and group size of the formats it is tested in
    formats: tuple[tuple[str, int, int], ...]
    options: dict[str, Any] = field(default_factory=dict)  # What differs from `SIZES`
    joined: bool = True  # Whether it has layers with the same input that can be joined

    def model(self, mode: str, bits: int, group_size: int) -> nn.Module:
        """Returns the model in float32, with norms and biases that do something."""
        module = import_module(f"mlx_lm.models.{self.family}")
        given = {"model_type": self.family, **SIZES, **self.options}
        mx.random.seed(11)
        model: nn.Module = module.Model(module.ModelArgs.from_dict(given))
        for path, array in arrays(model).items():
            if path.endswith(("norm.weight", "bias", "sinks")):
                noise = 0.2 * mx.random.normal(array.shape)
                model.load_weights([(path, array + noise)], strict=False)
        own = getattr(model, "quant_predicate", lambda *_: True)
        nn.quantize(
            model,
            group_size,
            bits,
            mode=mode,
            class_predicate=lambda path, layer: (
                hasattr(layer, "to_quantized") and own(path, layer)
            ),
        )
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model


ARCHITECTURES = {
    "llama": Architecture(
        family="llama", formats=(INT4, MXFP4), options={"tie_word_embeddings": True}
    ),
    "llama_sliding": Architecture(
        family="llama",
        formats=(INT3, MXFP8),
        options={"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": Architecture(family="qwen2", formats=(INT4_WIDE, NVFP4)),
    "qwen3": Architecture(family="qwen3", formats=(INT8, MXFP4)),
    "qwen3_moe": Architecture(
        family="qwen3_moe", formats=(INT4, NVFP4), options=ROUTED
    ),
    "qwen3_next": Architecture(
        family="qwen3_next",
        formats=(INT4_WIDE, MXFP8),
        options=ROUTED
        | {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "shared_expert_intermediate_size": 64,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    "gemma3_text": Architecture(
        family="gemma3_text",
        formats=(INT6, INT4),
        options={"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
    "phi3": Architecture(family="phi3", formats=(INT3, INT8), joined=False),
    "mixtral": Architecture(family="mixtral", formats=(INT4, MXFP4), options=ROUTED),
    "gpt_oss": Architecture(
        family="gpt_oss",
        formats=(MXFP4, INT8),
        options=ROUTED | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": Architecture(
        family="granite",
        formats=(INT6, NVFP4),
        options={
            "logits_scaling": 8.0,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
        },
    ),
    "deepseek_v3": Architecture(
        family="deepseek_v3",
        formats=(INT4, INT8),
        options=CHOSEN_BY_SIGMOIDS
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "v_head_dim": 64,
            "qk_nope_head_dim": 64,
        },
    ),
    "glm4_moe": Architecture(
        family="glm4_moe",
        formats=(INT4_WIDE, MXFP4),
        options=CHOSEN_BY_SIGMOIDS
        | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
    ),
    "mamba2": Architecture(
        family="mamba2",
        formats=(INT3, INT4),
        options={
            "num_heads": 4,
            "state_size": 32,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.0, float("inf")],
            "time_step_rank": "auto",
        },
        joined=False,
    ),
    # MLX's embeddings in MX formats return bfloat16, which olmo2 multiplies at once.
    "olmo2": Architecture(family="olmo2", formats=(INT8, INT6)),
}
