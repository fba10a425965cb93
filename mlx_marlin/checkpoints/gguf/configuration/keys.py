"""What the keys under an architecture's prefix mean to mlx-lm's models.

A key is read, or must have a value that changes nothing, or has no effect on numbers;
any other is refused, since it may change what a model computes.

The facts are llama.cpp's: its list of keys (`LLM_KV_NAMES` in src/llama-arch.cpp,
commit 00395eb2), what it reads for every architecture (`load_hparams` in
src/llama-model.cpp) and for one (`load_arch_hparams` in src/models/: llama.cpp,
qwen3.cpp, qwen3moe.cpp and openai-moe.cpp at commit 069be0ae, qwen35moe.cpp at
02ebd8f7, glm4-moe.cpp at 06e514f6, mistral3.cpp at 1df2e908, lfm2.cpp at 1ceca7c7,
qwen2moe.cpp at 623ac8d3, gemma2.cpp at 82234e08, phi3.cpp at 358a4a01, gemma4.cpp
at 06e514f6).
"""

from collections.abc import Mapping

from mlx_marlin.checkpoints.gguf.configuration.facts import Facts
from mlx_marlin.checkpoints.settings import words

READ = words(
    """
    attention.head_count attention.head_count_kv attention.key_length
    attention.layer_norm_rms_epsilon attention.value_length block_count context_length
    embedding_length feed_forward_length rope.dimension_count rope.freq_base
    rope.scale_linear rope.scaling.attn_factor rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
    """
)
"""Keys that every model's configuration is made of."""
_EXPERTS = words("expert_count expert_used_count")
# Sections are of positions in pictures; a text's are equal.
_LINEAR = words(
    """
    full_attention_interval nextn_predict_layers rope.dimension_sections
    ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank
    """
)
_CAPS = words("attn_logit_softcapping final_logit_softcapping")
_WINDOW = words("attention.sliding_window")
_PATTERN = words("attention.sliding_window_pattern rope.freq_base_swa") | _WINDOW
_OF_WINDOWS = _PATTERN | words(
    "attention.key_length_swa attention.value_length_swa rope.dimension_count_swa"
)
READ_FOR: Mapping[str, frozenset[str]] = {
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": _EXPERTS | _WINDOW,
    "glm4": words("nextn_predict_layers"),
    "glm4_moe": _EXPERTS
    | words("expert_weights_norm expert_weights_scale nextn_predict_layers"),
    "lfm2": words("shortconv.l_cache"),
    "ministral3": words("attention.temperature_scale rope.scaling.yarn_log_multiplier"),
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR | _EXPERTS,
    "gemma2": _CAPS | _WINDOW,
    "gemma3_text": _PATTERN,
    "gemma4_text": _EXPERTS
    | _OF_WINDOWS
    | words(
        "attention.shared_kv_layers embedding_length_per_layer_input "
        "final_logit_softcapping"
    ),
}
"""Keys that only one model's configuration is made of, by mlx-lm's model type."""
NO_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",  # of norms that these models do not have
        "classifier.output_labels",
        "expert_feed_forward_length",  # this and the next: the tensors' shapes say it
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "interleave_moe_layer_step",  # this and the next: the tensors' names say it
        "leading_dense_block_count",
        "moe_every_n_layers",
        "pooling_type",  # of embeddings of texts, which mlx-lm does not make
        "rope.scaling.finetuned",
        "tensor_data_layout",  # of files before GGUF; llama.cpp does not read it
        "vocab_size",  # the embedding's rows say it
    }
)
"""Keys that change no number."""
_WINDOWS = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")
"""Models with windows in llama.cpp; it reads Phi-3's and switches it off."""
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # none said, and softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_norm": (False, True),
    "expert_weights_scale": (0, 1),  # `build_moe_ffn` skips both
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),  # llama.cpp's default, and YaRN's
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "use_parallel_residual": (False,),
}
"""Values that change nothing. llama.cpp skips scales, caps and clamps of 0."""
_NEUTRAL_FOR: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "mixtral": {"expert_weights_norm": (True,)},
    "qwen2_moe": {"expert_weights_norm": (False,)},
    "qwen3_moe": {"expert_weights_norm": (True,)},
    "qwen3_5_moe": {"expert_weights_norm": (True,)},
    "glm4_moe": {"expert_gating_func": (0, 2)},  # sigmoid if none is said
    # Softmax over the weights of the experts that are used: their sum is 1.
    "gpt_oss": {"expert_gating_func": (0, 3), "attention.sliding_window_pattern": (2,)},
    # Windows of both kinds of layers are all positions up to their length.
    "gemma2": {"attention.sliding_window_pattern": (2,)},
}
"""Values that change nothing for one model: what llama.cpp and mlx-lm compute."""


def check_keys(facts: Facts, model_type: str, rope_base: float) -> None:
    """Refuses keys that change numbers in a way that mlx-lm's model cannot."""
    unchanged = READ | READ_FOR.get(model_type, frozenset()) | NO_EFFECT
    if model_type not in _WINDOWS:
        unchanged |= _OF_WINDOWS
    neutral = {
        **_NEUTRAL,
        "attention.key_length_swa": (facts.head_dim,),
        "attention.value_length_swa": (facts.head_dim,),
        "embedding_length_out": (0, facts.hidden_size),
        "rope.dimension_count_swa": (facts.head_dim,),
        "rope.freq_base_swa": (rope_base,),
        **_NEUTRAL_FOR.get(model_type, {}),
    }
    for key in facts:
        if key in unchanged:
            continue
        if key not in neutral:
            raise facts.refusal(key, "is not known for this architecture")
        value = facts.container.metadata[facts.prefix + key]
        if not isinstance(value, int | float) or value not in neutral[key]:
            wanted = " or ".join(map(str, neutral[key]))
            raise facts.refusal(
                key, f"must be {wanted}: mlx-lm's {model_type!r} has no such parameter"
            )
