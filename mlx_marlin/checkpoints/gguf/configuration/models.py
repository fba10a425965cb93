"""What the configuration of only one of mlx-lm's models has."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_marlin.checkpoints.gguf.configuration.facts import (
    Facts,
    expert_rows,
    qwen_experts,
    qwen_shared_expert,
    routed,
)
from mlx_marlin.checkpoints.gguf.configuration.gemma4 import gemma4
from mlx_marlin.checkpoints.gguf.rows import linear_heads

Config = dict[str, Any]
"""What `config.json` holds."""

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Models of so many layers divide queries by the root of hidden_size / heads, others
by that of head_dim; llama.cpp decides likewise, since no key says it."""
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything."""
_GEMMA2_WINDOW = 4096
"""llama.cpp's default (src/models/gemma2.cpp at commit 82234e08)."""
GATED = ("qwen3_5", "qwen3_5_moe")
"""Model types of mlx-lm whose queries have gates beside them."""
_WINDOWS = ("sliding_attention", "full_attention")
"""Layers of gpt-oss, in turn; mlx-lm's default drops the last of an odd number."""


def _llama(facts: Facts) -> Config:
    biases = [
        facts.has(f"blk.0.{stem}.bias") for stem in ("attn_q", "attn_k", "attn_output")
    ]
    if len(set(biases)) > 1:
        raise ValueError(
            f"{facts.container.path}: tensors 'blk.0.attn_q.bias' and "
            "'blk.0.attn_output.bias': mlx-lm's 'llama' has either both or none"
        )
    return {"attention_bias": biases[0], "mlp_bias": facts.has("blk.0.ffn_up.bias")}


def _mixtral(facts: Facts) -> Config:
    return routed(facts, "num_local_experts")


def _qwen3_moe(facts: Facts) -> Config:
    return {
        **qwen_experts(facts),
        "mlp_only_layers": [
            layer
            for layer in range(facts.layers)
            if not facts.has(f"blk.{layer}.ffn_gate_inp.weight")
        ],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _query_scalar(facts: Facts, name: str) -> int:
    """Returns an integer, as llama.cpp divides; transformers refuses a float."""
    if facts.layers == _GEMMA_27B_LAYERS[name]:
        return facts.hidden_size // facts.heads
    return facts.head_dim


def _gemma2(facts: Facts) -> Config:
    return {
        "query_pre_attn_scalar": _query_scalar(facts, "gemma2"),
        "attn_logit_softcapping": facts.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.positive("final_logit_softcapping", 30.0),
        # mlx-lm's model has no windows: results are llama.cpp's up to their length.
        "max_position_embeddings": min(
            facts.integer("context_length"),
            facts.count("attention.sliding_window", _GEMMA2_WINDOW),
        ),
    }


def _gemma3(facts: Facts) -> Config:
    pattern = facts.count("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if pattern > facts.layers:
        raise facts.refusal(
            "attention.sliding_window_pattern", f"is more than {facts.layers} layers"
        )
    return {
        "query_pre_attn_scalar": _query_scalar(facts, "gemma3"),
        "rope_local_base_freq": facts.positive("rope.freq_base_swa", 10000.0),
        "sliding_window": facts.count("attention.sliding_window"),
        "sliding_window_pattern": pattern,
    }


def _rotated_part(facts: Facts) -> float:
    rotated = facts.count("rope.dimension_count", facts.head_dim)
    if rotated > facts.head_dim or rotated % 2:
        raise facts.refusal(
            "rope.dimension_count", f"is not an even part of {facts.head_dim} features"
        )
    return rotated / facts.head_dim


def _phi3(facts: Facts) -> Config:
    return {
        "partial_rotary_factor": _rotated_part(facts),
        "original_max_position_embeddings": facts.integer(
            "rope.scaling.original_context_length",
            facts.integer("context_length"),
        ),
    }


def _gpt_oss(facts: Facts) -> Config:
    return {
        **routed(facts, "num_local_experts"),
        "intermediate_size": facts.rows("blk.0.ffn_gate_exps.weight"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [_WINDOWS[layer % 2] for layer in range(facts.layers)],
    }


def ministral_rope(facts: Facts, config: Config, scaling: Config | None) -> Config:
    """Returns `rope_parameters`, with the factor of queries by their position."""
    log_factor = "rope.scaling.yarn_log_multiplier"
    if scaling is not None and facts.real(log_factor, 0.0) != 1.0:
        raise facts.refusal(log_factor, "must be 1 beside YaRN")
    usual = {"original_max_position_embeddings": config["max_position_embeddings"]}
    return {
        "type": "default",
        "rope_theta": config["rope_theta"],
        "llama_4_scaling_beta": facts.real("attention.temperature_scale", 0.0),
        **(usual if scaling is None else {**scaling, "mscale": 1, "mscale_all_dim": 1}),
    }


def _glm4(facts: Facts) -> Config:
    return {
        "attention_bias": facts.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": _rotated_part(facts),
    }


def _glm4_moe(facts: Facts) -> Config:
    experts = [facts.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(facts.layers)]
    rows, shared = expert_rows(facts), facts.rows(facts.first("ffn_gate_shexp"))
    return {
        **_glm4(facts),
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
        **routed(facts, "n_routed_experts"),
        "n_shared_experts": shared // rows,
        "moe_intermediate_size": rows,
        "first_k_dense_replace": experts.index(True) if any(experts) else facts.layers,
        "routed_scaling_factor": facts.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": facts.flag("expert_weights_norm"),
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
    }


def _lfm2(facts: Facts) -> Config:
    heads = facts.counts("attention.head_count_kv")
    return {
        "norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "conv_bias": any(
            facts.has(f"blk.{layer}.shortconv.in_proj.bias")
            for layer in range(facts.layers)
        ),
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "block_dim": facts.hidden_size,
        "block_ff_dim": facts.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "full_attn_idxs": [layer for layer, count in enumerate(heads) if count],
    }


def _qwen3_5(facts: Facts) -> Config:
    heads = linear_heads(facts.container)
    interval = facts.count("full_attention_interval", 4)
    inner = heads.values * heads.value_dim
    facts.check_size(
        "ssm.inner_size", facts.first("ssm_out"), (facts.hidden_size, inner)
    )
    facts.check_size(
        "ssm.conv_kernel",
        facts.first("ssm_conv1d"),
        (
            2 * heads.keys * heads.key_dim + inner,
            facts.count("ssm.conv_kernel"),
        ),
    )
    for layer in range(facts.layers):
        is_linear = (layer + 1) % interval != 0
        if facts.has(f"blk.{layer}.ssm_out.weight") != is_linear:
            raise facts.refusal(
                "full_attention_interval", f"does not fit layer {layer}"
            )
    return {
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "full_attention_interval": interval,
        "rope_parameters": {
            "type": "default",
            "rope_theta": facts.positive("rope.freq_base", 10000.0),
            "partial_rotary_factor": _rotated_part(facts),
        },
    }


def _qwen3_5_moe(facts: Facts) -> Config:
    return {
        **_qwen3_5(facts),
        **qwen_shared_expert(facts),
        "norm_topk_prob": True,
    }


SPECIFIC: Mapping[str, Callable[[Facts], Config]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": qwen_shared_expert,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": gemma4,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "lfm2": _lfm2,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}
"""What only one of mlx-lm's models has, by model type."""
WITH_HEAD_DIM = (
    *("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma4_text"),
    *("gpt_oss", "ministral3", "glm4", "glm4_moe", "qwen3_5", "qwen3_5_moe"),
)
"""Model types of mlx-lm with heads of any width."""
UNTIED = ("qwen2_moe", "gpt_oss", "glm4", "glm4_moe")
"""Model types of mlx-lm that cannot use the embedding as their output."""
