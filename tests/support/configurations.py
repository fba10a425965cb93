"""Configurations of today's models with tiny sizes, and names of their checkpoints."""

import re
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils

EXPERTS, WINDOW = 4, 8
Arrays = dict[str, np.ndarray]
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
}
"""Settings of every model that has them."""
KINDS = ["sliding_attention", "full_attention"]
_TIED = {"tie_word_embeddings": True}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_INDEXED = _LATENT | {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 64}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_GRANITE = {
    "logits_scaling": 8.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
}
_MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "conv_kernel": 4,
    "n_groups": 1,
    "ssm_state_size": 64,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
}
_SHORT_CONV = {"conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1]}
_GEMMA3 = {"query_pre_attn_scalar": 32, "sliding_window_pattern": 2}
_GEMMA4 = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "layer_types": KINDS,
    "tie_word_embeddings": True,
}
_NEMOTRON = _MAMBA | {"moe_shared_expert_intermediate_size": 64}
_BAILING = {"moe_shared_expert_intermediate_size": 64, "group_norm_size": 2}
_KIMI = {
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 128,
    "num_experts_per_token": 2,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 192,
    "expert_ffn_hidden_size": 64,
    "moe_topk": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LLAMA4 = {
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "attention_chunk_size": 64,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 192,
    "use_qk_norm": True,
}
_ERNIE_EXPERTS = {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_layer_start_index": 1}
_ROPE = {
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
_YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
_LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("llama", _LLAMA3),
    "Llama-3.2-1B": ("llama", _LLAMA3 | _TIED),
    "Mistral-7B-v0.3": ("mistral", {}),
    "Ministral-3-8B": ("ministral3", _ROPE),
    "Mistral-Small-3.2": ("mistral3", {"text_config": {"model_type": "llama"}}),
    "Mistral-Small-4": ("mistral4", _LATENT | _ROPE),
    "Mixtral-8x7B": ("mixtral", {}),
    "Llama-4-Scout": ("llama4", {"text_config": _LLAMA4}),
    "SmolLM3-3B": ("smollm3", _TIED),
    "Seed-OSS-36B": ("seed_oss", {"attention_bias": True}),
    "Apertus-8B": ("apertus", {"post_norm": False, "qk_norm": True}),
    "MiMo-7B": ("mimo", {}),
    "InternLM3-8B": ("internlm3", {}),
    "MiniCPM3-4B": (
        "minicpm3",
        _LATENT | _YARN | {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12},
    ),
    "Qwen2.5-0.5B": ("qwen2", _TIED),
    "Qwen2.5-7B": ("qwen2", {}),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {}),
    "Qwen3-0.6B": ("qwen3", _TIED),
    "Qwen3-8B": ("qwen3", _YARN),
    "Qwen3-30B-A3B": ("qwen3_moe", {}),
    "Qwen3-Next-80B-A3B": ("qwen3_next", _LINEAR),
    "Qwen3.5-9B": ("qwen3_5", {"text_config": _LINEAR | {"num_experts": 0}}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {"text_config": _LINEAR}),
    "Qwen3-VL-8B": ("qwen3_vl", {"text_config": {"model_type": "qwen3"}}),
    "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", {"text_config": {"model_type": "qwen3_moe"}}),
    "Gemma-2-9B": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0} | _TIED,
    ),
    "Gemma-3-1B": ("gemma3_text", _TIED | _GEMMA3),
    "Gemma-3-12B": ("gemma3", {"text_config": _TIED | _GEMMA3}),
    "Gemma-4-E2B": (
        "gemma4_text",
        _GEMMA4 | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 64},
    ),
    "Gemma-4-26B-A4B": (
        "gemma4_text",
        _GEMMA4
        | {"enable_moe_block": True, "top_k_experts": 2}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "Phi-4-mini": ("phi3", _TIED),
    "Phi-3.5-MoE": ("phimoe", {}),
    "Aya-Expanse-8B": ("cohere", {}),
    "Command-A": ("cohere2", {"sliding_window_pattern": 2}),
    "DeepSeek-V2-Lite": ("deepseek_v2", _LATENT | {"q_lora_rank": None} | _YARN),
    "DeepSeek-V3": ("deepseek_v3", _LATENT),
    "DeepSeek-V3.2": ("deepseek_v32", _INDEXED),
    "Kimi-K2.5": ("kimi_k25", {"text_config": _LATENT}),
    "Kimi-Linear-48B-A3B": ("kimi_linear", _LATENT | _KIMI),
    "GLM-4-9B": ("glm4", {}),
    "GLM-4.5-Air": ("glm4_moe", {"use_qk_norm": True}),
    "GLM-4.7-Flash": ("glm4_moe_lite", _LATENT),
    "GLM-5": ("glm_moe_dsa", _INDEXED | _ROPE),
    "gpt-oss-20b": ("gpt_oss", {"intermediate_size": 64, "layer_types": KINDS}),
    "OLMo-2-7B": ("olmo2", {}),
    "Olmo-3-7B": ("olmo3", {"layer_types": KINDS}),
    "OLMoE-1B-7B": ("olmoe", {}),
    "Granite-3.3-8B": ("granite", _GRANITE | _TIED),
    "Granite-3.1-3B-A800M": ("granitemoe", _GRANITE | _TIED),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        _GRANITE
        | _MAMBA
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 128},
    ),
    "Granite-4.0-Micro": (
        "granitemoehybrid",
        _GRANITE
        | {"layer_types": ["attention"] * 2, "shared_intermediate_size": 192}
        | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "EXAONE-4.0-32B": ("exaone4", {"sliding_window_pattern": "LG"}),
    "ERNIE-4.5-0.3B": ("ernie4_5", _TIED),
    "ERNIE-4.5-21B-A3B": ("ernie4_5_moe", _ERNIE_EXPERTS),
    "Hunyuan-7B": ("hunyuan_v1_dense", {}),
    "LFM2-1.2B": (
        "lfm2",
        _SHORT_CONV
        | {"block_dim": 128, "block_ff_dim": 192, "block_multiple_of": 64}
        | {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    ),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        _SHORT_CONV | {"num_dense_layers": 1, "use_expert_bias": False},
    ),
    "MiniMax-M2": (
        "minimax",
        {"shared_intermediate_size": 0, "rotary_dim": 16, "use_qk_norm": True},
    ),
    "Nemotron-3-Nano": (
        "nemotron_h",
        _NEMOTRON | {"hybrid_override_pattern": ["M", "E", "*", "-"]},
    ),
    "Falcon-H1-1.5B": (
        "falcon_h1",
        _MAMBA | {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "Ling-mini-2.0": (
        "bailing_moe",
        _BAILING | {"norm_head": True, "use_qk_norm": True},
    ),
    "Ling-2.6": ("bailing_moe_v3", _LATENT | _BAILING | {"layer_group_size": 2}),
    "LongCat-Flash": ("longcat_flash", _LATENT | _LONGCAT),
    "dots.llm1": ("dots1", {}),
}
"""By the name of a model on the Hugging Face Hub: mlx-lm's module, and what differs
from `COMMON`."""
W1_TO_W3 = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PROJECTIONS = dict.fromkeys(
    ("mixtral", "minimax", "lfm2_moe", "kimi_linear", "phimoe"), W1_TO_W3
)
PROJECTIONS["nemotron_h"] = {"fc1": "up_proj", "fc2": "down_proj"}
"""Names of experts' projections on the Hub, if they are others than mlx-lm's."""


def settings_of(name: str) -> dict[str, Any]:
    """Returns the config.json of a configuration."""
    module, own = CONFIGURATIONS[name]
    settings = {**COMMON, **own, "model_type": module}
    if "text_config" in own:
        inner = {"model_type": f"{module}_text"} | own["text_config"]
        settings["text_config"] = {**COMMON, **inner}
    return settings


def new_model(config: dict[str, Any]) -> nn.Module:
    """Returns mlx-lm's model, with parameters that nobody has set."""
    model_class, arguments = utils._get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    return model


def drawn_parameters(model: nn.Module) -> Arrays:
    """Returns random numbers for a model's parameters, by mlx-lm's names."""
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.normal(size=array.shape) * 0.1 + (array.ndim == 1 and "norm" in name)
        ).astype(np.float32)
        for name, array in tree_flatten(model.parameters())
    }


def published(module: str, arrays: Arrays) -> Arrays:
    """Returns a model's arrays as its makers publish them; experts stay stacked.

    mlx-lm's `sanitize` is the inverse; a test compares the two.
    """
    found = dict(arrays)
    for name in arrays:
        layer = name.rpartition(".")[0]
        if name.endswith(".embed_q.weight"):
            attention = layer.removesuffix(".embed_q")
            keys, values = found.pop(name), found.pop(f"{attention}.unembed_out.weight")
            both = np.concatenate([keys.swapaxes(-1, -2), values], axis=1)
            kept = both.reshape(-1, both.shape[-1])
            found[f"{attention}.kv_b_proj.weight"] = kept
        elif found.get(name, arrays[name]).ndim == 3 and "conv" in name:
            found[name] = found[name].swapaxes(1, 2)
        elif module.startswith("granitemoe") and name.endswith(
            (".switch_mlp.gate_proj.weight", ".mlp.gate_proj.weight")
        ):
            _join_granite(found, layer.rpartition(".")[0])
    return {_renamed(module, name): array for name, array in found.items()}


def _join_granite(arrays: Arrays, block: str) -> None:
    """Joins gate and up of a block, whose parts Granite calls "input" and "output"."""
    owner = block.removesuffix(".switch_mlp")
    if owner == block:
        owner = block.removesuffix("mlp") + "shared_mlp"
    parts = [arrays.pop(f"{block}.{part}_proj.weight") for part in ("gate", "up")]
    arrays[f"{owner}.input_linear.weight"] = np.concatenate(parts, axis=-2)
    arrays[f"{owner}.output_linear.weight"] = arrays.pop(f"{block}.down_proj.weight")


_TEXT_INSIDE = [
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model", "model.language_model"),
]
RENAMED: dict[str, list[tuple[str, str]]] = {
    "bailing_moe": [(r"\.gate\.gate_proj\.", ".gate.")],
    "kimi_linear": [
        (r"\.([qkv])_conv\.conv\.", r".\1_conv1d."),
        (r"\.mlp\.(switch_mlp|shared_experts|gate)\.", r".block_sparse_moe.\1."),
        (r"\.mlp\.(e_score_correction_bias)", r".block_sparse_moe.gate.\1"),
    ],
    "lfm2_moe": [
        (rf"(feed_forward)\.{ours}\.", rf"\1.{theirs}.")
        for ours, theirs in W1_TO_W3.items()
    ],
    "qwen3_5": _TEXT_INSIDE,
    "qwen3_5_moe": _TEXT_INSIDE,
    "qwen3_vl": _TEXT_INSIDE,
    "qwen3_vl_moe": _TEXT_INSIDE,
}
"""Patterns of mlx-lm's names, and what stands for them on the Hub, by module."""


def _renamed(module: str, name: str) -> str:
    for pattern, other in RENAMED.get(module, ()):
        name = re.sub(pattern, other, name)
    return name


EXPERT = re.compile(
    r"(.*?)(?:\.experts)?\.(?:switch_mlp|switch_glu|experts)\.(\w+)\.(\w+)"
)
STACKED = ("granitemoe", "granitemoehybrid")
"""Modules whose experts are stacked on the Hub, so that no tool quantizes them."""


def experts_of(module: str, name: str, array: np.ndarray) -> list[str]:
    """Returns the names of the matrices in a stack of experts; none for others."""
    parts = EXPERT.fullmatch(name)
    if parts is None or len(array) != EXPERTS or module in STACKED:
        return []
    block, own, part = parts.groups()
    projection = PROJECTIONS.get(module, {}).get(own, own)
    return [f"{block}.experts.{e}.{projection}.{part}" for e in range(EXPERTS)]
