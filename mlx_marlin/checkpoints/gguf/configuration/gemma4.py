"""What the configuration of Gemma 4 has, whose layers differ from each other.

Facts are llama.cpp's: `Gemma4Model` in conversion/gemma.py at commit 061b8c5f, and
src/models/gemma4.cpp at commit 06e514f6.
"""

from typing import Any

from mlx_marlin.checkpoints.gguf.architectures import layers_of
from mlx_marlin.checkpoints.gguf.configuration.facts import (
    Facts,
    expert_rows,
    routed,
)

Config = dict[str, Any]
_KEY_HEADS = "attention.head_count_kv"
_SHARED = "attention.shared_kv_layers"


def gemma4(facts: Facts) -> Config:
    """Returns what the configuration has beside that of every model."""
    is_sliding = facts.counts("attention.sliding_window_pattern")
    own = layers_of(facts.container).with_keys
    full = [layer for layer in range(own) if not is_sliding[layer]]
    has_values = {facts.has(f"blk.{layer}.attn_v.weight") for layer in full}
    if len(has_values) > 1:
        raise ValueError(
            f"{facts.container.path}: tensors 'attn_v.weight' are missing in some "
            f"layers with full attention only"
        )
    config = {
        "head_dim": facts.count("attention.key_length_swa"),
        "global_head_dim": facts.head_dim,
        "attention_k_eq_v": has_values == {False},
        "num_kv_shared_layers": facts.layers - own,
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if each else "full_attention" for each in is_sliding
        ],
        "final_logit_softcapping": facts.real("final_logit_softcapping", 0.0) or None,
        **_key_heads(facts, is_sliding),
        **_widths(facts, own),
        **_inputs_of_layers(facts),
        **_experts(facts),
    }
    _check_shared(facts, is_sliding, own)
    _check_heads(facts, config, own)
    return config


def gemma4_rope(facts: Facts, base: float, scaling: Config | None) -> Config:
    """Returns `rope_parameters`: one kind for each kind of attention."""
    if scaling is None:
        raise ValueError(
            f"{facts.container.path}: tensor 'rope_freqs.weight' is missing"
        )
    return {
        "full_attention": {**scaling, "rope_theta": base},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": facts.positive("rope.freq_base_swa"),
        },
    }


def _key_heads(facts: Facts, is_sliding: list[int]) -> Config:
    counts = facts.each(_KEY_HEADS)
    kinds = [
        {count for count, each in zip(counts, is_sliding, strict=True) if each == kind}
        for kind in (True, False)
    ]
    sliding, full = (kind or kinds[not index] for index, kind in enumerate(kinds))
    if len(sliding) != 1 or len(full) != 1 or 0 in sliding | full:
        raise facts.refusal(_KEY_HEADS, "has not one number for each kind of attention")
    return {
        "num_key_value_heads": sliding.pop(),
        "num_global_key_value_heads": full.pop(),
    }


def _widths(facts: Facts, own: int) -> Config:
    """Returns the features of MLPs, which may be twice as many from layer `own` on."""
    key = "feed_forward_length"
    widths = facts.each(key)
    doubled = [
        width * (2 if layer >= own else 1)
        for layer, width in enumerate([widths[0]] * facts.layers)
    ]
    is_wide = widths != [widths[0]] * facts.layers
    if is_wide and widths != doubled:
        raise facts.refusal(key, f"is not twice as many from layer {own} on")
    facts.check_size(key, "blk.0.ffn_up.weight", (widths[0], None))
    return {"intermediate_size": widths[0], "use_double_wide_mlp": is_wide}


def _inputs_of_layers(facts: Facts) -> Config:
    key, tensor = "embedding_length_per_layer_input", "per_layer_token_embd.weight"
    width = facts.integer(key, 0)
    if width == 0:
        return {"hidden_size_per_layer_input": 0}
    facts.check_size(key, tensor, (None, width * facts.layers))
    return {
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": facts.rows(tensor),
    }


def _experts(facts: Facts) -> Config:
    if not facts.has("blk.0.ffn_gate_inp.weight"):
        for key in ("expert_count", "expert_used_count"):
            if facts.integer(key, 0):
                raise facts.refusal(key, "must be 0 without tensors of experts")
        return {"enable_moe_block": False}
    found = routed(facts)
    return {
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": expert_rows(facts),
    }


def _check_shared(facts: Facts, is_sliding: list[int], own: int) -> None:
    """Refuses layers that would take keys of different layers.

    llama.cpp takes those of the last layer with keys if it attends to everything, and
    of the one before it if it does not; mlx-lm those of the last layer of the kind.
    """
    for kind in {*is_sliding[own:]}:
        last = [layer for layer in range(own) if is_sliding[layer] == kind][-1:]
        if last != [own - (2 if kind else 1)]:
            raise facts.refusal(
                _SHARED, "does not fit attention.sliding_window_pattern"
            )


def _check_heads(facts: Facts, config: Config, own: int) -> None:
    """Refuses sizes that the first layers of each kind of attention have not."""
    width = config["head_dim"]
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if facts.integer(key, width) != width:
            raise facts.refusal(key, f"must be attention.key_length_swa ({width})")
    sliding, full = (
        config["num_key_value_heads"],
        config["num_global_key_value_heads"],
    )
    if sliding != full and not config["attention_k_eq_v"]:
        raise facts.refusal(_KEY_HEADS, "must be one number where values are apart")
    for kind, features, heads in (
        ("sliding_attention", width, sliding),
        ("full_attention", facts.head_dim, full),
    ):
        if facts.heads % heads:
            raise facts.refusal(_KEY_HEADS, f"does not divide {facts.heads} heads")
        if kind not in config["layer_types"][:own]:
            continue
        layer = f"blk.{config['layer_types'].index(kind)}"
        suffix = "_swa" if kind == "sliding_attention" else ""
        for stem, count in (("attn_q", facts.heads), ("attn_k", heads)):
            facts.check_size(
                f"attention.key_length{suffix}",
                f"{layer}.{stem}.weight",
                (count * features, None),
            )
