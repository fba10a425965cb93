"""The configuration of mlx-lm's model, from a GGUF file's metadata."""

from mlx_marlin.checkpoints.gguf.architectures import architecture_of
from mlx_marlin.checkpoints.gguf.configuration.facts import Facts, first_experts
from mlx_marlin.checkpoints.gguf.configuration.gemma4 import gemma4_rope
from mlx_marlin.checkpoints.gguf.configuration.keys import check_keys
from mlx_marlin.checkpoints.gguf.configuration.models import (
    GATED,
    SPECIFIC,
    UNTIED,
    WITH_HEAD_DIM,
    Config,
    ministral_rope,
)
from mlx_marlin.checkpoints.gguf.configuration.rope import check_rope, rope_scaling
from mlx_marlin.checkpoints.gguf.container import Container
from mlx_marlin.checkpoints.gguf.tokenizer import end_tokens

_MIXED = "gemma4_text"
"""Model type of mlx-lm whose layers have sizes of two kinds."""


def config_of(container: Container) -> Config:
    """Returns what `config.json` of the model holds for mlx-lm.

    A key that says what mlx-lm's model cannot do raises a ValueError that names it.
    """
    architecture = architecture_of(container)
    facts = Facts(container)
    model_type = architecture.model_type
    config = _common(facts) | {"model_type": model_type}
    if model_type != _MIXED:
        config |= _equal_layers(facts)
    if model_type in SPECIFIC:
        config |= SPECIFIC[model_type](facts)
    check_keys(facts, model_type, config["rope_theta"])
    _check_sizes(facts, config)
    check_rope(facts, model_type)
    scaling = rope_scaling(facts, config["rope_theta"])
    if model_type == "ministral3":
        config["rope_parameters"] = ministral_rope(facts, config, scaling)
    elif model_type == _MIXED:
        base = config["rope_theta"]
        config["rope_parameters"] = gemma4_rope(facts, base, scaling)
    elif scaling is not None:
        config["rope_scaling"] = scaling
    if config["tie_word_embeddings"] and model_type in UNTIED:
        raise ValueError(
            f"{container.path}: tensor 'output.weight' is missing, and mlx-lm's "
            f"{model_type!r} has an output of its own"
        )
    return config


def _common(facts: Facts) -> Config:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.positive("rope.freq_base", 10000.0),
        "vocab_size": facts.rows("token_embd.weight"),
        "tie_word_embeddings": not facts.has("output.weight"),
        **_token_ids(facts.container),
    }


def _equal_layers(facts: Facts) -> Config:
    """Returns sizes that are those of all layers."""
    return {
        "intermediate_size": facts.integer("feed_forward_length", 0),
        "num_key_value_heads": _key_heads(facts),
        "head_dim": facts.head_dim,
    }


def _key_heads(facts: Facts) -> int:
    """Returns the heads of keys, which are 0 for layers without attention."""
    key = "attention.head_count_kv"
    value = facts.container.metadata.get(facts.prefix + key)
    if not isinstance(value, memoryview):
        return facts.count(key, facts.heads)
    counts = {count for count in facts.counts(key) if count}
    if len(counts) != 1:
        raise facts.refusal(key, "has not one number of heads above 0")
    return counts.pop()


def _check_sizes(facts: Facts, config: Config) -> None:
    """Refuses sizes that are not those of the first layer's tensors."""
    key, value = "attention.key_length", "attention.value_length"
    if facts.integer(value, facts.head_dim) != facts.head_dim:
        raise facts.refusal(value, f"must be {key} ({facts.head_dim})")
    if config["model_type"] != _MIXED:  # which has compared the sizes of both kinds
        _check_heads(facts, config, key)
        is_mixture = "num_experts_per_tok" in config
        (_check_experts if is_mixture else _check_dequantized)(facts, config)


def _check_heads(facts: Facts, config: Config, key: str) -> None:
    width, heads, kv_heads = facts.head_dim, facts.heads, config["num_key_value_heads"]
    if heads % kv_heads:
        raise facts.refusal("attention.head_count_kv", f"does not divide {heads} heads")
    any_width = config["model_type"] in WITH_HEAD_DIM
    if not any_width and width * heads != facts.hidden_size:
        raise facts.refusal(
            key, f"must be {facts.hidden_size} / {heads} for mlx-lm's model"
        )
    gates = 2 if config["model_type"] in GATED else 1
    rows = {"attn_q": gates * heads, "attn_k": kv_heads, "attn_v": kv_heads}
    if config["model_type"] == "phi3":
        rows = {"attn_qkv": heads + 2 * kv_heads}
    for stem, count in rows.items():
        facts.check_size(
            key if key in facts else "attention.head_count",
            facts.first(stem),
            (count * width, None),
        )


def _check_dequantized(facts: Facts, config: Config) -> None:
    fused = 2 if config["model_type"] in ("phi3", "glm4") else 1
    rows = fused * config["intermediate_size"]
    facts.check_size("feed_forward_length", "blk.0.ffn_up.weight", (rows, None))


def _check_experts(facts: Facts, config: Config) -> None:
    if config["model_type"] == "mixtral":
        rows = config["intermediate_size"]
        facts.check_size("feed_forward_length", first_experts(facts), (rows, None))


def _token_ids(container: Container) -> Config:
    """Returns the tokens that begin and end a text; any of the latter stops mlx-lm."""
    ends, begin = end_tokens(container), "tokenizer.ggml.bos_token_id"
    ids: Config = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    if begin in container.metadata:
        ids["bos_token_id"] = container.integer(begin)
    return ids
