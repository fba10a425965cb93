"""The configuration of mlx-lm's model, from a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_marlin.checkpoints.gguf.container import Container
from mlx_marlin.checkpoints.gguf.names import architecture_of
from mlx_marlin.checkpoints.gguf.rope import check_rope, rope_scaling

_NO_PARAMETER = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "expert_group_count",
    "expert_weights_scale",
    "nextn_predict_layers",
)
"""Keys that change what a model computes, and that mlx-lm's models do not have."""
_SOFTMAX = 1
"""llama.cpp's number of the function that weighs experts."""

Config = dict[str, Any]
"""What `config.json` holds."""

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Models of so many layers divide queries by the root of hidden_size / heads, others
by that of head_dim; llama.cpp decides likewise, since no key says it."""
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything."""


def config_of(container: Container) -> Config:
    """Returns what `config.json` of the model holds for mlx-lm.

    Args:
        container: A GGUF file.

    Raises:
        ValueError: If a key is missing, or says what mlx-lm's model cannot do. The
            message names the file and the key.
    """
    architecture = architecture_of(container)
    facts = _Facts(container)
    facts.check_neutral(*_NO_PARAMETER)
    if architecture.model_type != "gemma2":
        facts.check_neutral("attn_logit_softcapping", "final_logit_softcapping")
    config = _common(facts) | {"model_type": architecture.model_type}
    config |= _SPECIFIC.get(architecture.model_type, _nothing)(facts)
    if architecture.model_type not in _WITH_HEAD_DIM:
        facts.check_head_dim()
    check_rope(container, facts.head_dim, architecture.model_type)
    scaling = rope_scaling(container, config["rope_theta"], facts.head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if config["tie_word_embeddings"] and architecture.model_type in _UNTIED:
        raise ValueError(
            f"{container.path}: tensor 'output.weight' is missing, and mlx-lm's "
            f"{architecture.model_type!r} has an output of its own"
        )
    return config


class _Facts:
    """Values of the metadata under the architecture's prefix."""

    def __init__(self, container: Container):
        self.container = container
        self.prefix = container.text("general.architecture") + "."
        self.heads = self.integer("attention.head_count")
        self.hidden_size = self.integer("embedding_length")
        self.head_dim = self._head_dim()
        self.layers = self.integer("block_count")
        if self.layers > len(container.tensors):
            raise container.refusal(
                f"{self.prefix}block_count", "is more than the file has tensors"
            )

    def integer(self, key: str, default: int | None = None) -> int:
        if default is not None and self.prefix + key not in self.container.metadata:
            return default
        return self.container.integer(self.prefix + key)

    def real(self, key: str, default: float | None = None) -> float:
        if default is not None and self.prefix + key not in self.container.metadata:
            return default
        return self.container.real(self.prefix + key)

    def positive(self, key: str, default: float) -> float:
        if self.prefix + key not in self.container.metadata:
            return default
        return self.container.positive(self.prefix + key)

    def _head_dim(self) -> int:
        if self.heads == 0:
            key = f"{self.prefix}attention.head_count"
            raise self.container.refusal(key, "is not above 0")
        width = self.integer("attention.key_length", self.hidden_size // self.heads)
        if width == 0:
            key = f"{self.prefix}attention.key_length"
            raise self.container.refusal(key, "leaves heads without features")
        return width

    def has(self, tensor: str) -> bool:
        return tensor in self.container.tensors

    def rows(self, tensor: str) -> int:
        if not self.has(tensor):
            raise ValueError(f"{self.container.path}: tensor {tensor!r} is missing")
        shape = self.container.tensors[tensor].shape
        return shape[-2] if len(shape) > 1 else shape[0]

    def check_neutral(self, *keys: str) -> None:
        """Refuses keys of scales and counts other than 0, which llama.cpp ignores."""
        for key in keys:
            if self.real(key, 0.0) != 0.0:
                raise self.container.refusal(
                    self.prefix + key, "is not a parameter of mlx-lm's model"
                )

    def check_experts(self) -> None:
        """Refuses experts that are not weighed by a softmax."""
        if self.integer("expert_gating_func", _SOFTMAX) != _SOFTMAX:
            raise self.container.refusal(
                f"{self.prefix}expert_gating_func",
                f"is not {_SOFTMAX} (softmax), which mlx-lm's model computes",
            )

    def check_head_dim(self) -> None:
        """Refuses heads that are not hidden_size / heads wide."""
        if self.head_dim * self.heads != self.hidden_size:
            raise self.container.refusal(
                f"{self.prefix}attention.key_length",
                f"must be {self.hidden_size} / {self.heads} for mlx-lm's model",
            )


def _common(facts: _Facts) -> Config:
    value_length = facts.integer("attention.value_length", facts.head_dim)
    if value_length != facts.head_dim:
        raise facts.container.refusal(
            f"{facts.prefix}attention.value_length",
            f"must be attention.key_length ({facts.head_dim}) for mlx-lm",
        )
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.layers,
        "intermediate_size": facts.integer("feed_forward_length", 0),
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", facts.heads),
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.positive("rope.freq_base", 10000.0),
        "vocab_size": facts.rows("token_embd.weight"),
        "tie_word_embeddings": not facts.has("output.weight"),
        **_token_ids(facts.container),
    }


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


def _nothing(_: _Facts) -> Config:
    return {}


def _llama(facts: _Facts) -> Config:
    biases = [
        facts.has(f"blk.0.{stem}.bias") for stem in ("attn_q", "attn_k", "attn_output")
    ]
    if len(set(biases)) > 1:
        raise ValueError(
            f"{facts.container.path}: tensors 'blk.0.attn_q.bias' and "
            "'blk.0.attn_output.bias': mlx-lm's 'llama' has either both or none"
        )
    return {"attention_bias": biases[0], "mlp_bias": facts.has("blk.0.ffn_up.bias")}


def _mixtral(facts: _Facts) -> Config:
    facts.check_experts()
    return {
        "num_local_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
    }


def _qwen2_moe(facts: _Facts) -> Config:
    facts.check_experts()
    return {
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.rows("blk.0.ffn_gate_exps.weight"),
        "shared_expert_intermediate_size": facts.rows("blk.0.ffn_gate_shexp.weight"),
    }


def _qwen3_moe(facts: _Facts) -> Config:
    facts.check_experts()
    layers = range(facts.layers)
    names = [f"blk.{layer}.ffn_gate_exps.weight" for layer in layers]
    sparse = [name for name in names if facts.has(name)]
    return {
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.rows(sparse[0] if sparse else names[0]),
        "mlp_only_layers": [
            layer
            for layer, name in zip(layers, names, strict=True)
            if name not in sparse
        ],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _query_scalar(facts: _Facts, name: str) -> int:
    """Returns an integer, as llama.cpp divides; transformers refuses a float."""
    if facts.layers == _GEMMA_27B_LAYERS[name]:
        return facts.hidden_size // facts.heads
    return facts.head_dim


def _gemma2(facts: _Facts) -> Config:
    return {
        "query_pre_attn_scalar": _query_scalar(facts, "gemma2"),
        "attn_logit_softcapping": facts.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.real("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: _Facts) -> Config:
    return {
        "query_pre_attn_scalar": _query_scalar(facts, "gemma3"),
        "rope_local_base_freq": facts.positive("rope.freq_base_swa", 10000.0),
        "sliding_window": facts.integer("attention.sliding_window"),
        "sliding_window_pattern": facts.integer(
            "attention.sliding_window_pattern", _GEMMA3_PATTERN
        ),
    }


def _phi3(facts: _Facts) -> Config:
    rotated = facts.integer("rope.dimension_count", facts.head_dim)
    return {
        "partial_rotary_factor": rotated / facts.head_dim,
        "original_max_position_embeddings": facts.integer(
            "rope.scaling.original_context_length",
            facts.integer("context_length"),
        ),
    }


def _gpt_oss(facts: _Facts) -> Config:
    return {
        "num_local_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "intermediate_size": facts.rows("blk.0.ffn_gate_exps.weight"),
        "sliding_window": facts.integer("attention.sliding_window"),
    }


_SPECIFIC: Mapping[str, Callable[[_Facts], Config]] = {
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
