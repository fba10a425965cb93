"""Tiny models of the families that have heads, and heads as files store them."""

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.lm.checkpoints.head_source import load_heads
from mlx_marlin.lm.drafts.heads import DraftHead, Trunk

SIZE, EXPERTS, LAYERS = 64, 4, 2
"""Width, which is the vocabulary too: embeddings can be orthonormal."""
_SIZES: dict[str, Any] = {
    "hidden_size": SIZE,
    "vocab_size": SIZE,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "layernorm_epsilon": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
}
_LINEAR = {
    "full_attention_interval": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXED = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}
_GLM5 = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_GROUPS = {"layer_group_size": 2, "group_norm_size": 2, "use_qk_norm": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": _LINEAR,
    "qwen3_5": {**_LINEAR, "num_experts": 0},
    "qwen3_5_moe": _LINEAR,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | _INDEXED,
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT | _INDEXED | _GLM5,
    "bailing_moe": {"use_qk_norm": True},
    "bailing_moe_linear": _GROUPS,
    "bailing_hybrid": _LATENT | _GROUPS,
    "bailing_moe_v3": _LATENT
    | {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 64},
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "v_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "moe_layers_enum": "1",
    },
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 64,
    },
    "exaone_moe": {
        "layer_types": ["sliding_attention", "full_attention"],
        "is_moe_layer": [False, True],
    },
}
"""By mlx-lm's module."""


def config(family: str) -> dict[str, Any]:
    return {"model_type": family, **_SIZES, **CONFIGS[family]}


def stored_config(family: str) -> dict[str, Any]:
    """Returns a config as transformers writes it, which checks it."""
    found = config(family)
    return {key: value for key, value in found.items() if value is not None}


def trunk(family: str, **options: Any) -> nn.Module:
    """Returns a model in float32 whose norms do something."""
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(7)
    given = module.ModelArgs.from_dict(config(family) | options)
    model: nn.Module = module.Model(given)
    noisy(model)
    return model


def noisy(model: nn.Module) -> None:
    """Gives norms, biases and routers values that matter."""
    for name, array in tree_flatten(model.parameters()):
        if array.ndim == 1 or name.endswith("gate.weight"):
            noise = 0.2 * mx.random.normal(array.shape)
            model.load_weights([(name, array + noise)], strict=False)
    mx.eval(model.parameters())


_DENSE = {
    f"mlp.{name}_proj.weight": shape
    for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))
}


def _experts(start: str, projections: Iterable[tuple[str, tuple[int, int]]]) -> Any:
    return {
        f"{start}.{expert}.{name}.weight": shape
        for name, shape in projections
        for expert in range(EXPERTS)
    }


def _gated(name: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (64, 64),
        f"{name}.up_proj.weight": (64, 64),
        f"{name}.down_proj.weight": (64, 64),
    }


_GATED = [("gate_proj", (64, 64)), ("up_proj", (64, 64)), ("down_proj", (64, 64))]
_ROUTED = {"mlp.gate.weight": (EXPERTS, 64), **_experts("mlp.experts", _GATED)}
_SHARED = _ROUTED | _gated("mlp.shared_experts")
_BIASED = _SHARED | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
_LAYER_NORMS = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}


def _attention(gate: int = 1, norms: bool = False, bias: bool = False) -> Any:
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (64 * gate, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
    }
    if norms:
        found |= {f"self_attn.{each}_norm.weight": (16,) for each in "qk"}
    if bias:
        sizes = {"q": 64, "k": 32, "v": 32}
        found |= {f"self_attn.{p}_proj.bias": (n,) for p, n in sizes.items()}
    return found


def _latent(name: str = "self_attn", out: str = "o_proj") -> Any:
    return {
        f"{name}.q_a_proj.weight": (32, 64),
        f"{name}.q_a_layernorm.weight": (32,),
        f"{name}.q_b_proj.weight": (4 * 32, 32),
        f"{name}.kv_a_proj_with_mqa.weight": (48, 64),
        f"{name}.kv_a_layernorm.weight": (32,),
        f"{name}.kv_b_proj.weight": (4 * 32, 32),
        f"{name}.{out}.weight": (64, 64),
    }


_INDEXER = {
    "self_attn.indexer.wq_b.weight": (64, 32),
    "self_attn.indexer.wk.weight": (32, 64),
    "self_attn.indexer.k_norm.weight": (32,),
    "self_attn.indexer.k_norm.bias": (32,),
    "self_attn.indexer.weights_proj.weight": (2, 64),
}
_FUSED = {
    "mlp.gate.weight": (EXPERTS, 64),
    "mlp.experts.gate_up_proj": (EXPERTS, 128, 64),
    "mlp.experts.down_proj": (EXPERTS, 64, 64),
}
_SHARED_GATE = _gated("mlp.shared_expert") | {"mlp.shared_expert_gate.weight": (1, 64)}


def _at(start: str, shapes: Any) -> Any:
    return {f"{start}{name}": shape for name, shape in shapes.items()}


def _mtp(block: Any) -> Any:
    return {
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.fc.weight": (64, 128),
        "mtp.norm.weight": (64,),
        **_at("mtp.layers.0.", _LAYER_NORMS | block),
    }


def _joining(start: str, norm: str, block: Any) -> Any:
    parts = {"enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128)}
    return _at(start, parts | {f"{norm}.weight": (64,)} | _LAYER_NORMS | block)


def _deepseek(block: Any) -> Any:
    ends = {"embed_tokens.weight": (64, 64), "shared_head.head.weight": (64, 64)}
    return _joining(f"model.layers.{LAYERS}.", "shared_head.norm", block | ends)


def _bailing(attention: Any) -> Any:
    return _joining(f"model.layers.{LAYERS}.", "final_layernorm", attention | _SHARED)


_QKV = {
    "attention.query_key_value.weight": (128, 64),
    "attention.dense.weight": (64, 64),
    "attention.query_layernorm.weight": (16,),
    "attention.key_layernorm.weight": (16,),
}
_EXPERT_BIAS = {"mlp.gate.expert_bias": (EXPERTS,)}
_SLIDING = _attention() | {"self_attn.attention_sink_bias": (4,)}
_STEP = _attention(norms=True) | {"self_attn.g_proj.weight": (4, 64)}
_SQUARED = [("up_proj", (64, 64)), ("down_proj", (64, 64))]
STORED: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3_next": _mtp(_attention(2, norms=True) | _ROUTED | _SHARED_GATE),
    "qwen3_5": _mtp(_attention(2, norms=True) | _DENSE),
    "qwen3_5_moe": _mtp(_attention(2, norms=True) | _FUSED | _SHARED_GATE),
    "deepseek_v3": _deepseek(_latent() | _BIASED),
    "deepseek_v32": _deepseek(_latent() | _INDEXER | _BIASED),
    "glm4_moe": _deepseek(_attention(norms=True) | _BIASED),
    "glm4_moe_lite": _deepseek(_latent() | _BIASED),
    "glm_moe_dsa": _deepseek(_latent() | _INDEXER | _BIASED),
    "bailing_moe": _bailing(_QKV),
    "bailing_moe_linear": _bailing(_QKV),
    "bailing_hybrid": _bailing(_latent("attention", "dense") | _EXPERT_BIAS),
    "bailing_moe_v3": _bailing(
        _latent("attention", "dense")
        | _EXPERT_BIAS
        | {"attention.g_proj.weight": (4, 64)}
    ),
    "mimo": _at(
        "model.mtp_layers.0.",
        {
            "token_layernorm.weight": (64,),
            "hidden_layernorm.weight": (64,),
            "input_proj.weight": (64, 128),
            "final_layernorm.weight": (64,),
            **_LAYER_NORMS,
            **_attention(bias=True),
            **_DENSE,
        },
    ),
    "mimo_v2_flash": {
        name.replace("post_attention", "pre_mlp"): shape
        for name, shape in _joining(
            "model.mtp.layers.0.", "final_layernorm", _SLIDING | _DENSE
        ).items()
    },
    "step3p5": _joining(
        f"model.layers.{LAYERS}.",
        "transformer.shared_head.norm",
        _STEP | _DENSE | {"transformer.shared_head.output.weight": (64, 64)},
    ),
    "ernie4_5_moe": {
        "model.mtp_emb_norm.0.weight": (64,),
        "model.mtp_hidden_norm.0.weight": (64,),
        "model.mtp_linear_proj.0.weight": (64, 128),
        **_at("model.mtp_block.0.", _LAYER_NORMS | _attention() | _DENSE),
    },
    "nemotron_h": _at(
        "mtp.layers.",
        {
            "0.enorm.weight": (64,),
            "0.hnorm.weight": (64,),
            "0.eh_proj.weight": (64, 128),
            "0.norm.weight": (64,),
            "1.final_layernorm.weight": (64,),
            "1.norm.weight": (64,),
            "1.mixer.gate.weight": (EXPERTS, 64),
            "1.mixer.gate.e_score_correction_bias": (EXPERTS,),
            "1.mixer.shared_experts.up_proj.weight": (64, 64),
            "1.mixer.shared_experts.down_proj.weight": (64, 64),
            **{
                name.replace("self_attn", "0.mixer"): shape
                for name, shape in _attention().items()
            },
            **_experts("1.mixer.experts", _SQUARED),
        },
    ),
    "exaone_moe": _mtp(_attention(norms=True) | _DENSE),
}
"""The names of a head's tensors in the original's files, and their shapes."""
ZERO_CENTRED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "step3p5")


def stored(family: str) -> dict[str, mx.array]:
    """Returns the random tensors of a head as the original stores them."""
    mx.random.seed(8)
    found = {}
    for name, shape in STORED[family].items():
        array = 0.2 * mx.random.normal(shape)
        is_norm = array.ndim == 1 and "norm" in name
        found[name] = array + 1 if is_norm and family not in ZERO_CENTRED else array
    return found


def write(folder: Path, tensors: dict[str, mx.array], **settings: Any) -> Path:
    """Writes a folder of a head alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def load(folder: Path, family: str, **options: Any) -> tuple[nn.Module, DraftHead]:
    """Returns a model and its plain head, after a round through a file."""
    model = trunk(family, **options)
    write(folder, stored(family))
    return model, load_heads(folder, model, bits=None)


SILENT = ("o_proj", "out_proj", "down_proj", "dense", "fc2")
SUCCESSOR = mx.roll(mx.eye(SIZE), 1, axis=0)
"""An output head after which comes the next token, or a W that maps to it."""


def craft(model: nn.Module, head: DraftHead, *, by: str, swapped: bool = False) -> None:
    """Makes a model that counts, and a head that knows that.

    `by`: the half of what W multiplies that it looks at: "embedding" or "hidden".
    `swapped`: whether it looks at the other half instead.
    """
    for whole in (model, head.block):
        for name, module in whole.named_modules():
            if name.rpartition(".")[2] in SILENT and "weight" in module:
                module.weight = mx.zeros_like(module.weight)
        for name, array in tree_flatten(whole.parameters()):
            if array.ndim == 1 and "norm" in name:
                whole.load_weights([(name, mx.ones_like(array))], strict=False)
    own: Any = Trunk(model)
    own.inner[own.embedding_name].weight = mx.eye(SIZE)
    own.text.lm_head.weight = SUCCESSOR
    if "output" in head.block:
        head.block["output"].weight = SUCCESSOR
    half = mx.eye(SIZE) if by == "embedding" else SUCCESSOR
    halves = [half, mx.zeros((SIZE, SIZE))]
    is_first = (by == "embedding") == head.family.embedding_first
    joined = halves if is_first != swapped else halves[::-1]
    block: Any = Trunk(head.block)
    block.inner[block.embedding_name].weights.weight = mx.concatenate(joined, axis=1)
