"""The configuration of mlx-lm's model, from a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_marlin.checkpoints.gguf.configuration.facts import Facts
from mlx_marlin.checkpoints.gguf.configuration.keys import check_keys
from mlx_marlin.checkpoints.gguf.configuration.rope import check_rope, rope_scaling
from mlx_marlin.checkpoints.gguf.container import Container
from mlx_marlin.checkpoints.gguf.names import architecture_of

Config = dict[str, Any]
"""What `config.json` holds."""

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Models of so many layers divide queries by the root of hidden_size / heads, others
by that of head_dim; llama.cpp decides likewise, since no key says it."""
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything."""
_GEMMA2_WINDOW = 4096
"""llama.cpp's default (src/models/gemma2.cpp at commit 82234e08)."""
_WINDOWS = ("sliding_attention", "full_attention")
"""Layers of gpt-oss, in turn; mlx-lm's default drops the last of an odd number."""


def config_of(container: Container) -> Config:
    """Returns what `config.json` of the model holds for mlx-lm.

    Args:
        container: A GGUF file.

    Raises:
        ValueError: If a key is missing, or says what mlx-lm's model cannot do. The
            message names the file and the key.
    """
    architecture = architecture_of(container)
    facts = Facts(container)
    model_type = architecture.model_type
    config = _common(facts) | {"model_type": model_type}
    if model_type in _SPECIFIC:
        config |= _SPECIFIC[model_type](facts)
    check_keys(facts, model_type, config["rope_theta"])
    _check_sizes(facts, config)
    check_rope(facts, model_type)
    scaling = rope_scaling(facts, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if config["tie_word_embeddings"] and model_type in _UNTIED:
        raise ValueError(
            f"{container.path}: tensor 'output.weight' is missing, and mlx-lm's "
            f"{model_type!r} has an output of its own"
        )
    return config


def _common(facts: Facts) -> Config:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.layers,
        "intermediate_size": facts.integer("feed_forward_length", 0),
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", facts.heads),
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.positive("rope.freq_base", 10000.0),
        "vocab_size": facts.rows("token_embd.weight"),
        "tie_word_embeddings": not facts.has("output.weight"),
        **_token_ids(facts.container),
    }


def _check_sizes(facts: Facts, config: Config) -> None:
    """Refuses sizes that are not those of the first layer's tensors."""
    width, heads, kv_heads = facts.head_dim, facts.heads, config["num_key_value_heads"]
    key = "attention.key_length"
    if facts.integer("attention.value_length", width) != width:
        raise facts.refusal("attention.value_length", f"must be {key} ({width})")
    if heads % kv_heads:
        raise facts.refusal("attention.head_count_kv", f"does not divide {heads} heads")
    any_width = config["model_type"] in _WITH_HEAD_DIM
    if not any_width and width * heads != facts.hidden_size:
        raise facts.refusal(
            key, f"must be {facts.hidden_size} / {heads} for mlx-lm's model"
        )
    rows = {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}
    if config["model_type"] == "phi3":
        rows = {"attn_qkv": heads + 2 * kv_heads}
    for stem, count in rows.items():
        facts.check_size(
            key if key in facts else "attention.head_count",
            f"blk.0.{stem}.weight",
            (count * width, None),
        )
    (_check_experts if "num_experts_per_tok" in config else _check_dequantized)(
        facts, config
    )


def _check_dequantized(facts: Facts, config: Config) -> None:
    fused = 2 if config["model_type"] == "phi3" else 1
    rows = fused * config["intermediate_size"]
    facts.check_size("feed_forward_length", "blk.0.ffn_up.weight", (rows, None))


def _check_experts(facts: Facts, config: Config) -> None:
    experts = facts.count("expert_count")
    if config["num_experts_per_tok"] > experts:
        raise facts.refusal("expert_used_count", f"is more than {experts} experts")
    name = _first_experts(facts)
    facts.check_size("expert_count", name, (experts, None, None))
    if config["model_type"] == "mixtral":
        rows = config["intermediate_size"]
        facts.check_size("feed_forward_length", name, (rows, None))


def _first_experts(facts: Facts) -> str:
    """Returns the gates of the first layer with experts; of layer 0 if none has."""
    names = [f"blk.{layer}.ffn_gate_exps.weight" for layer in range(facts.layers)]
    return next(filter(facts.has, names), names[0])


def _token_ids(container: Container) -> Config:
    """Returns the tokens that begin and end a text; any of the latter stops mlx-lm."""
    prefix = "tokenizer.ggml."
    ends = [f"{prefix}{name}_token_id" for name in ("eos", "eot", "eom")]
    present = [container.integer(key) for key in ends if key in container.metadata]
    ids: Config = {}
    if present:
        unique = list(dict.fromkeys(present))
        ids["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    if f"{prefix}bos_token_id" in container.metadata:
        ids["bos_token_id"] = container.integer(f"{prefix}bos_token_id")
    return ids


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
    return {
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
    }


def _qwen2_moe(facts: Facts) -> Config:
    return {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.rows("blk.0.ffn_gate_exps.weight"),
        "shared_expert_intermediate_size": facts.rows("blk.0.ffn_gate_shexp.weight"),
    }


def _qwen3_moe(facts: Facts) -> Config:
    return {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.rows(_first_experts(facts)),
        "mlp_only_layers": [
            layer
            for layer in range(facts.layers)
            if not facts.has(f"blk.{layer}.ffn_gate_exps.weight")
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


def _phi3(facts: Facts) -> Config:
    rotated = facts.count("rope.dimension_count", facts.head_dim)
    if rotated > facts.head_dim or rotated % 2:
        raise facts.refusal(
            "rope.dimension_count", f"is not an even part of {facts.head_dim} features"
        )
    return {
        "partial_rotary_factor": rotated / facts.head_dim,
        "original_max_position_embeddings": facts.integer(
            "rope.scaling.original_context_length",
            facts.integer("context_length"),
        ),
    }


def _gpt_oss(facts: Facts) -> Config:
    return {
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "intermediate_size": facts.rows("blk.0.ffn_gate_exps.weight"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [_WINDOWS[layer % 2] for layer in range(facts.layers)],
    }


_SPECIFIC: Mapping[str, Callable[[Facts], Config]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
}
"""What only one of mlx-lm's models has, by model type."""
_WITH_HEAD_DIM = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss")
"""Model types of mlx-lm with heads of any width."""
_UNTIED = ("qwen2_moe", "gpt_oss")
"""Model types of mlx-lm that cannot use the embedding as their output."""
