"""Tiny models of mlx-lm: their metadata in GGUF, and their configurations."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4, 2, 64, 40


@dataclass
class Case:
    """A tiny model."""

    architecture: str  # llama.cpp's name
    model_type: str  # mlx-lm's name
    # Metadata under the architecture's prefix, next to the usual
    keys: dict[str, Any] = field(default_factory=dict)
    tied: bool = False  # Whether the output is the embedding
    layers: int = 2  # Decoder layers; a pattern of Gemma 3 has six
    biases: bool = False  # Whether linear layers have biases

    @property
    def metadata(self) -> dict[str, Any]:
        usual = {
            "block_count": self.layers,
            "context_length": 128,
            "embedding_length": HIDDEN,
            "feed_forward_length": 96,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        named = {
            f"{self.architecture}.{key}": v for key, v in (usual | self.keys).items()
        }
        return {"general.architecture": self.architecture, **named}


_WIDE = {"attention.key_length": 32, "attention.value_length": 32}
_MIXTURE = {"expert_count": 4, "expert_used_count": 2}
_GEMMA4 = {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 16,
    "attention.value_length": 32,
    "attention.value_length_swa": 16,
    "final_logit_softcapping": 20.0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
}
KEY_DIM, VALUE_HEADS = 16, 4
"""Of linear attention, whose heads of keys are `KV_HEADS`."""
_LINEAR = {
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "ssm.conv_kernel": 4,
    "ssm.group_count": KV_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.state_size": KEY_DIM,
    "ssm.inner_size": VALUE_HEADS * KEY_DIM,
    "full_attention_interval": 4,
}
CASES = {
    "llama": Case("llama", "llama", {"rope.dimension_count": 16}),
    "llama_tied": Case("llama", "llama", _WIDE | {"rope.dimension_count": 32}, True),
    "llama_biased": Case("llama", "llama", biases=True),
    "mixtral": Case("llama", "mixtral", _MIXTURE),
    "qwen2": Case("qwen2", "qwen2", tied=True),
    "qwen3": Case("qwen3", "qwen3", _WIDE),
    "qwen2moe": Case(
        "qwen2moe",
        "qwen2_moe",
        _MIXTURE
        | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3moe": Case(
        "qwen3moe", "qwen3_moe", _WIDE | _MIXTURE | {"expert_feed_forward_length": 32}
    ),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        _WIDE | {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
        True,
    ),
    "gemma3": Case(
        "gemma3", "gemma3_text", _WIDE | {"attention.sliding_window": 16}, True, 6
    ),
    "gemma4": Case(
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | {
            "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": [True, True, True, False, True, False],
            "embedding_length_per_layer_input": 16,
            "feed_forward_length": [96, 96, 96, 96, 192, 192],
        },
        True,
        6,
    ),
    "gemma4_experts": Case(
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | _MIXTURE
        | {
            "attention.head_count_kv": [KV_HEADS, KV_HEADS, 1],
            "attention.shared_kv_layers": 0,
            "attention.sliding_window_pattern": [True, True, False],
            "embedding_length_per_layer_input": 0,
            "expert_feed_forward_length": 32,
        },
        True,
        3,
    ),
    "phi3": Case("phi3", "phi3", {"rope.dimension_count": 8}),
    "mistral3": Case(
        "mistral3",
        "ministral3",
        _WIDE
        | {
            "attention.temperature_scale": 0.1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "glm4": Case("glm4", "glm4", _WIDE | {"rope.dimension_count": 16}),
    "glm4moe": Case(
        "glm4moe",
        "glm4_moe",
        _WIDE
        | _MIXTURE
        | {
            "rope.dimension_count": 16,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
        layers=3,
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {"attention.head_count_kv": [0, KV_HEADS], "shortconv.l_cache": 3},
        True,
    ),
    "qwen35": Case("qwen35", "qwen3_5", _WIDE | _LINEAR, True, 4),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe", _WIDE | _LINEAR | _MIXTURE, False, 4),
    "qwen3next": Case("qwen3next", "qwen3_5_moe", _WIDE | _LINEAR | _MIXTURE, False, 4),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        _WIDE
        | _MIXTURE
        | {
            "attention.sliding_window": 16,
            "expert_feed_forward_length": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
        layers=3,
    ),
}


def arguments(case: Case) -> dict[str, Any]:
    """Returns the configuration that the model was trained with, written by hand."""
    wide = "attention.key_length" in case.keys
    config: dict[str, Any] = {
        "model_type": case.model_type,
        "num_hidden_layers": case.layers,
        "max_position_embeddings": 128,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32 if wide else HIDDEN // HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": case.tied,
    }
    if case.model_type == "gemma4_text":
        return config | _gemma4_arguments(case)
    if case.model_type == "llama":
        config |= {"attention_bias": case.biases, "mlp_bias": case.biases}
    linear = {
        "linear_num_key_heads": KV_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": KEY_DIM,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    if case.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe"):
        config |= {"num_experts": 4, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": 32}
    return config | {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen2_moe": {"shared_expert_intermediate_size": 48},
        "qwen3_moe": {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        "gemma2": {
            "query_pre_attn_scalar": 32.0,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        "gemma3_text": {"query_pre_attn_scalar": 32.0, "sliding_window": 16},
        "ministral3": {
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": float(np.float32(0.1)),
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1,
                "mscale_all_dim": 1,
            }
        },
        "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
        "glm4_moe": {
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": None,
        },
        "lfm2": {
            "norm_eps": float(np.float32(1e-5)),
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": HIDDEN,
            "block_ff_dim": 96,
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 1,
            "block_ffn_dim_multiplier": 1.0,
            "full_attn_idxs": [1],
        },
        "qwen3_5": linear,
        "qwen3_5_moe": {**linear, "shared_expert_intermediate_size": 48},
        "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 128},
        "gpt_oss": {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 64,
            },
        },
    }.get(case.model_type, {})


def _gemma4_arguments(case: Case) -> dict[str, Any]:
    of_layers = case.keys["embedding_length_per_layer_input"]
    kinds = {True: "sliding_attention", False: "full_attention"}
    config = {
        "head_dim": 16,
        "global_head_dim": 32,
        "rope_theta": 1000000.0,
        "attention_k_eq_v": not of_layers,
        "num_global_key_value_heads": KV_HEADS if of_layers else 1,
        "num_kv_shared_layers": case.keys["attention.shared_kv_layers"],
        "hidden_size_per_layer_input": of_layers,
        "use_double_wide_mlp": bool(of_layers),
        "sliding_window": 16,
        "layer_types": [
            kinds[each] for each in case.keys["attention.sliding_window_pattern"]
        ],
        "final_logit_softcapping": 20.0,
        "enable_moe_block": not of_layers,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    if of_layers:
        return config | {"vocab_size_per_layer_input": VOCABULARY}
    return config | {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
