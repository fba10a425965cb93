"""Names of tensors: llama.cpp's, and mlx-lm's for the same parameters.

llama.cpp's conversion changes three things besides names, which `reading` reverts:
rows of q and k of the architecture "llama" are permuted in each head, norms of Gemma
are stored as 1 + weight, and the one row of a shared expert's gate is a vector. Fused
projections of Phi-3 stay fused, and experts are stacked, in both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_marlin.checkpoints.gguf.container import Container

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_TIED_ENDS = {name: _ENDS[name] for name in ("token_embd", "output_norm")}


def _experts(gate: str, experts: str) -> dict[str, str]:
    return {
        "ffn_gate_inp": gate,
        "ffn_gate_exps": f"{experts}.gate_proj",
        "ffn_up_exps": f"{experts}.up_proj",
        "ffn_down_exps": f"{experts}.down_proj",
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model's tensors are called.

    Attributes:
        name: Architecture in llama.cpp.
        model_type: Module of mlx-lm that has the model.
        block: Modules of a decoder layer, by llama.cpp's name.
        ends: Modules outside of decoder layers, by llama.cpp's name.
        permuted: Whether rows of q and k are permuted.
        norm_offset: What is added to the weights of norms in the file.
    """

    name: str
    model_type: str
    block: Mapping[str, str]
    ends: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0


_LLAMA = Architecture("llama", "llama", _DENSE, _ENDS, permuted=True)
_MIXTRAL = Architecture(
    "llama",
    "mixtral",
    _DENSE | _experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
    _ENDS,
    permuted=True,
)
ARCHITECTURES: dict[str, Architecture] = {
    each.name: each
    for each in (
        _LLAMA,
        Architecture("qwen2", "qwen2", _DENSE, _ENDS),
        Architecture("qwen3", "qwen3", _DENSE | _HEAD_NORMS, _ENDS),
        Architecture(
            "qwen2moe",
            "qwen2_moe",
            _DENSE
            | _experts("mlp.gate", "mlp.switch_mlp")
            | {
                "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
                "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                "ffn_up_shexp": "mlp.shared_expert.up_proj",
                "ffn_down_shexp": "mlp.shared_expert.down_proj",
            },
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
    )
}
"""The architectures that are read, by llama.cpp's name; Mistral is "llama" too."""

FREQUENCY_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the configuration."""
_NO_SUFFIX = ("attn_sinks",)
"""Arrays that are parameters themselves, not of a module."""


def architecture_of(container: Container) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        ValueError: If it is none of ours.
    """
    key = "general.architecture"
    name = container.text(key)
    if name not in ARCHITECTURES:
        raise container.refusal(key, f"is not one of {', '.join(ARCHITECTURES)}")
    if name == "llama" and container.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]


def parameter_name(architecture: Architecture, name: str) -> str | None:
    """Returns mlx-lm's name of a tensor, or None if it belongs to the configuration.

    Args:
        architecture: The architecture.
        name: Name in llama.cpp, such as "blk.0.attn_q.weight".

    Raises:
        ValueError: If mlx-lm's model has no such parameter.
    """
    parts = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?(\w+)\.(weight|bias)", name)
    if parts is not None:
        layer, stem, suffix = parts.groups()
        if layer is None and stem in FREQUENCY_FACTORS and suffix == "weight":
            return None
        module = (architecture.ends if layer is None else architecture.block).get(stem)
        if module is not None:
            prefix = "" if layer is None else f"model.layers.{layer}."
            return prefix + (module if stem in _NO_SUFFIX else f"{module}.{suffix}")
    raise ValueError(f"mlx-lm's {architecture.model_type!r} has no such parameter")
