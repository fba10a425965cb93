"""The architectures that are read: llama.cpp's names of tensors, and mlx-lm's.

llama.cpp's conversion changes more than names, which `reading` reverts: rows are in
another order (`rows`), norms of Gemma are stored as 1 + weight, decays of linear
attention as -exp(weight), and axes of size 1 are dropped. Fused projections of Phi-3
stay fused, and experts are stacked, in both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlx_marlin.checkpoints.gguf.container import Container

Pieces = tuple[tuple[str, str], ...]
"""The parameters that a tensor holds: their modules, and the rule of their rows."""

Blocks = dict[str, str | Pieces]
_ATTENTION: Blocks = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE: Blocks = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS: Blocks = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA: Blocks = {
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4: Blocks = {
    **_GEMMA,
    **_HEAD_NORMS,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_TIED_ENDS = {name: _ENDS[name] for name in ("token_embd", "output_norm")}


def _experts(gate: str, experts: str) -> Blocks:
    return {
        "ffn_gate_inp": gate,
        "ffn_gate_exps": f"{experts}.gate_proj",
        "ffn_up_exps": f"{experts}.up_proj",
        "ffn_down_exps": f"{experts}.down_proj",
        "ffn_gate_up_exps": (
            (f"{experts}.gate_proj", "gate"),
            (f"{experts}.up_proj", "up"),
        ),
    }


def _shared_expert(expert: str) -> Blocks:
    return {
        "ffn_gate_shexp": f"{expert}.gate_proj",
        "ffn_up_shexp": f"{expert}.up_proj",
        "ffn_down_shexp": f"{expert}.down_proj",
    }


_PAIRS: Blocks = {
    "attn_q": (("self_attn.q_proj", "pairs of queries"),),
    "attn_k": (("self_attn.k_proj", "pairs of keys"),),
}
_POST_NORM: Blocks = {"post_attention_norm": "post_attention_layernorm"}


def _hybrid(rule: str) -> Blocks:
    """Returns linear attention beside the other kind; a rule for heads of values."""
    return {
        **_ATTENTION,
        **_HEAD_NORMS,
        **_POST_NORM,
        "attn_qkv": (("linear_attn.in_proj_qkv", rule),),
        "attn_gate": (("linear_attn.in_proj_z", rule),),
        "ssm_alpha": (("linear_attn.in_proj_a", rule),),
        "ssm_beta": (("linear_attn.in_proj_b", rule),),
        "ssm_ba": (
            ("linear_attn.in_proj_b", "betas"),
            ("linear_attn.in_proj_a", "alphas"),
        ),
        "ssm_conv1d": (("linear_attn.conv1d", rule),),
        "ssm_a": (("linear_attn.A_log", rule),),
        "ssm_dt": (("linear_attn.dt_bias", rule),),
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }


_QWEN_EXPERTS: Blocks = {
    **_experts("mlp.gate", "mlp.switch_mlp"),
    **_shared_expert("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MLP: Blocks = {name: _DENSE[name] for name in ("ffn_gate", "ffn_up", "ffn_down")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model's tensors are called."""

    name: str  # architecture in llama.cpp
    model_type: str  # module of mlx-lm that has the model
    block: Mapping[str, str | Pieces]  # modules of a decoder layer, by llama.cpp's name
    ends: Mapping[str, str]  # modules outside of decoder layers, by llama.cpp's name
    inside: str = ""  # the module of mlx-lm's model that has all others, and a dot
    # Layers whose columns are heads of values in llama.cpp's order
    grouped_columns: tuple[str, ...] = ()
    norm_offset: float = 0.0  # what is added to the weights of norms in the file
    # Tensors that have no use in layers with keys of another layer
    shared_keys: tuple[str, ...] = ()

    def has_parameter_scale(self, weight: str) -> bool:
        """Returns whether "NAME.scale" beside "NAME.weight" is a parameter."""
        stem = weight.split(".", 2)[-1].removesuffix(".weight")
        return f"{stem}.scale" in self.block


LLAMA = Architecture("llama", "llama", _DENSE | _PAIRS, _ENDS)
MIXTRAL = Architecture(
    "llama",
    "mixtral",
    _DENSE | _PAIRS | _experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
    _ENDS,
)
_INSIDE = "language_model."
ARCHITECTURES: dict[str, Architecture] = {
    each.name: each
    for each in (
        LLAMA,
        Architecture("qwen2", "qwen2", _DENSE, _ENDS),
        Architecture("qwen3", "qwen3", _DENSE | _HEAD_NORMS, _ENDS),
        Architecture(
            "qwen2moe",
            "qwen2_moe",
            _DENSE | _QWEN_EXPERTS,
            _ENDS,
        ),
        Architecture(
            "qwen3moe",
            "qwen3_moe",
            _DENSE | _HEAD_NORMS | _experts("mlp.gate", "mlp.switch_mlp"),
            _ENDS,
        ),
        Architecture("gemma2", "gemma2", _GEMMA, _TIED_ENDS, norm_offset=1.0),
        Architecture(
            "gemma3", "gemma3_text", _GEMMA | _HEAD_NORMS, _ENDS, norm_offset=1.0
        ),
        Architecture(
            "gemma4",
            "gemma4_text",
            _GEMMA4 | _experts("router.proj", "experts.switch_glu"),
            {
                **_ENDS,
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
            shared_keys=("attn_k", "attn_v", "attn_k_norm"),
        ),
        Architecture(
            "phi3",
            "phi3",
            {
                "attn_norm": "input_layernorm",
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_norm": "post_attention_layernorm",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
            _ENDS,
        ),
        Architecture(
            "gpt-oss",
            "gpt_oss",
            _ATTENTION
            | _experts("mlp.router", "mlp.experts")
            | {
                "attn_sinks": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
            },
            _ENDS,
        ),
        Architecture("mistral3", "ministral3", _DENSE | _PAIRS, _ENDS),
        Architecture(
            "glm4",
            "glm4",
            {
                **_DENSE,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
            _ENDS,
        ),
        Architecture(
            "glm4moe",
            "glm4_moe",
            {
                **_ATTENTION,
                **_HEAD_NORMS,
                **_POST_NORM,
                **_MLP,
                **_experts("mlp.gate", "mlp.switch_mlp"),
                **_shared_expert("mlp.shared_experts"),
                "exp_probs_b": "mlp.gate.e_score_correction_bias",
            },
            _ENDS,
        ),
        Architecture(
            "lfm2",
            "lfm2",
            {
                **_ATTENTION,
                "attn_norm": "operator_norm",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "ffn_norm": "ffn_norm",
                "ffn_gate": "feed_forward.w1",
                "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
            },
            {
                "token_embd": "model.embed_tokens",
                "token_embd_norm": "model.embedding_norm",
            },
        ),
        Architecture(
            "qwen35",
            "qwen3_5",
            _hybrid("grouped") | _MLP,
            _ENDS,
            inside=_INSIDE,
            grouped_columns=("ssm_out",),
        ),
        Architecture(
            "qwen35moe",
            "qwen3_5_moe",
            _hybrid("grouped") | _QWEN_EXPERTS,
            _ENDS,
            inside=_INSIDE,
            grouped_columns=("ssm_out",),
        ),
        # mlx-lm's Qwen 3.5 is Qwen3-Next with projections apart, as llama.cpp has them.
        Architecture(
            "qwen3next",
            "qwen3_5_moe",
            _hybrid("") | _QWEN_EXPERTS,
            _ENDS,
            inside=_INSIDE,
        ),
    )
}
"""The architectures that are read, by llama.cpp's name; Mistral is "llama" too."""


FREQUENCY_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the configuration."""
_WHOLE = ("ssm_a", "ffn_gate_inp.scale", "ffn_down_exps.scale")
"""Names without a suffix."""
_NO_SUFFIX = (*_WHOLE, "attn_sinks", "exp_probs_b", "layer_output_scale", "ssm_dt")
"""Arrays that are parameters themselves, not of a module."""
_FURTHER_TOKENS: dict[str, Pieces] = dict.fromkeys(
    (
        *("nextn.eh_proj", "nextn.embed_tokens", "nextn.enorm", "nextn.hnorm"),
        *("nextn.shared_head_head", "nextn.shared_head_norm"),
    ),
    (),
)
"""What layers that predict further tokens have beside the tensors of a decoder layer:
llama.cpp's `LLM_TENSOR_NEXTN_*` (src/llama-arch.h)."""


def architecture_of(container: Container) -> Architecture:
    """Returns the architecture of a file."""
    key = "general.architecture"
    name = container.text(key)
    if name not in ARCHITECTURES:
        raise container.refusal(key, f"is not one of {', '.join(ARCHITECTURES)}")
    if name == "llama" and container.metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES[name]


class Layers(NamedTuple):
    """Numbers of layers that a file's metadata announce."""

    stored: int
    decoders: int  # the first ones; the others predict further tokens
    with_keys: int  # the first ones, with keys and values of their own


def layers_of(container: Container) -> Layers:
    """Returns the numbers of layers."""
    prefix = container.text("general.architecture")
    key = f"{prefix}.block_count"
    counts = [container.integer(key)]
    if counts == [0]:
        raise container.refusal(key, "is not above 0")
    for less in ("nextn_predict_layers", "attention.shared_kv_layers"):
        key = f"{prefix}.{less}"
        others = container.integer(key, 0)
        if others >= counts[-1]:
            raise container.refusal(key, f"is not below {counts[-1]}")
        counts.append(counts[-1] - others)
    return Layers(*counts)


def pieces_of(architecture: Architecture, name: str, layers: Layers) -> Pieces:
    """Returns the parameters that a tensor holds, and the rules of their rows.

    The model has no use for factors of frequencies, which belong to the configuration,
    for layers that predict further tokens, and for keys in layers that take those of
    another one. Their tensors hold none.
    """
    pattern = r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([\w.]+?)(?:\.(weight|bias))?"
    parts = re.fullmatch(pattern, name)
    layer, stem, suffix = parts.groups() if parts else (None, "", None)
    if layer is None and stem in FREQUENCY_FACTORS and suffix == "weight":
        return ()
    index = -1 if layer is None else int(layer)
    modules = architecture.ends if layer is None else architecture.block
    found = {**modules, **_FURTHER_TOKENS}.get(stem)
    if found is None or (suffix is None) != (stem in _WHOLE):
        raise ValueError(f"mlx-lm's {architecture.model_type!r} has no such parameter")
    predicts = index >= layers.decoders
    if (stem in _FURTHER_TOKENS and not predicts) or index >= layers.stored:
        raise ValueError(
            f"block_count says that there are {layers.stored} layers, and "
            f"nextn_predict_layers that {layers.stored - layers.decoders} of them "
            f"predict further tokens"
        )
    takes_keys = index >= layers.with_keys and stem in architecture.shared_keys
    if predicts or (takes_keys and suffix == "weight"):
        return ()
    prefix = "" if layer is None else f"model.layers.{layer}."
    own = ((found, ""),) if isinstance(found, str) else found
    end = "" if stem in _NO_SUFFIX else f".{suffix}"
    return tuple(
        (f"{architecture.inside}{prefix}{module}{end}", rule) for module, rule in own
    )
