"""The model families of mlx-lm whose decoder blocks can be traced.

To support one more family, add an entry to `FAMILIES`. Its blocks must compute as
llama's do: attention and an MLP (or experts), each with a residual sum and with a norm
before it, after it, or both. `Family` describes the differences.

This module imports no family: a family that is not imported has no blocks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.tracing_code import report_untraced

Merge = Callable[[mx.array, mx.array], mx.array]
"""Combines two arrays: a residual sum or a gating. Blocks with equal ones share
graphs."""


@dataclass(frozen=True, slots=True)
class ScaledResidualSum:
    """Residual sum of granite: `residual + y * factor`."""

    factor: float  # Factor of the summand

    def __call__(self, residual: mx.array, y: mx.array) -> mx.array:
        """Returns the sum."""
        return residual + y * self.factor


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing rule: a row chooses the experts with the largest logits."""

    choices: int  # Experts of a row
    # Whether scores are the softmax over all experts. Otherwise over the chosen ones
    of_all: bool = False
    # Whether the last of equal logits are chosen, as by a stable ascending sort.
    # Otherwise the first, as by a stable sort of negated logits. (Some families sort
    # rounded probabilities; here logits are compared.)
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts that a family's blocks may have instead of an MLP.

    With a routing rule it computes `(layers(x, indices) * scores[..., None]).sum(-2)`,
    with the indices and scores that `routing` derives from `router(x)`, plus the result
    of the shared expert if there is one. Without a rule, mlx-lm's own code runs in the
    graph.
    """

    cls: str  # Class of the mixture
    # Returns the routing rule of one of these modules. None if kernels do not have its
    # rule, such as sigmoids with a correction bias
    routing: Callable[[Any], Routing] | None = None
    router: str = "gate"  # Name of the router layer in the mixture
    router_cls: str | None = None  # Class of the router if it is not a linear layer
    layers: str = "switch_mlp"  # Name of the experts in the mixture
    name: str = "mlp"  # Name of the mixture in the block
    # Class of the shared expert. None if there is none. With a routing rule it is
    # `shared_expert`, and its result is multiplied by the sigmoid of
    # `shared_expert_gate`
    shared: str | None = None


def _uses_sliding_window(block: Any) -> bool:
    return bool(getattr(block, "use_sliding", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of the parts of a decoder block in one module of `mlx_lm.models`."""

    block: str = "TransformerBlock"  # Class of the block
    attention: str = "Attention"  # Class of its attention
    mlp: str | None = "MLP"  # Class of its MLP. None if it has none
    # Attributes of attention: the number of query heads and of KV heads
    heads: tuple[str, str] = ("n_heads", "n_kv_heads")
    scale: str = "scale"  # Attribute of attention: the factor of the scores
    # Returns whether the mask of a block may hide distant tokens
    windowed: Callable[[Any], bool] = _uses_sliding_window
    # Mixture of experts that may take the place of the MLP
    experts: Experts | None = None
    norm: str | None = None  # Class of the norms. None if `nn.RMSNorm`
    # Names of the norms before attention and before the MLP; "" for none
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    # Names of the norms of the results of attention and of the MLP; "" for none.
    # Results of experts have no norm
    output_norms: tuple[str, str] = ("", "")
    # Returns, for a block and its module, how both results are added to the residual.
    # None for a plain sum, as results of experts always are
    add: Callable[[Any, ModuleType], Merge] | None = None
    gating: Merge | None = None  # Combines gate and up. None for swiglu
    # Whether q_proj also computes a gate of attention's result
    output_gate: bool = False

    @property
    def mlp_name(self) -> str:
        """Name of the MLP, or of the mixture of experts, in a block."""
        return "mlp" if self.experts is None else self.experts.name


def _geglu(gate: mx.array, up: mx.array) -> mx.array:
    y: mx.array = nn.gelu_approx(gate) * up
    return y


def _has_sliding_window(block: Any) -> bool:
    layer_type: str = block.args.layer_types[block.self_attn.layer_idx]
    return layer_type != "full_attention"


def _routing_of_qwen3(experts: Any) -> Routing:
    return Routing(experts.top_k, of_all=not experts.norm_topk_prob, last=True)


FAMILIES = {
    "dots1": Family(
        block="Dots1DecoderLayer",
        attention="Dots1Attention",
        mlp="Dots1MLP",
        experts=Experts(
            cls="Dots1MoE",
            router_cls="Dots1TopkRouter",
            layers="experts",
            shared="Dots1MLP",
        ),
    ),
    "ernie4_5": Family(block="DecoderLayer"),
    "ernie4_5_moe": Family(
        block="Ernie4_5_DecoderLayer",
        mlp="Ernie4_5_MLP",
        experts=Experts(cls="Ernie4_5_MoeMLP", shared="Ernie4_5_MLP"),
    ),
    "exaone4": Family(
        norms=("", ""),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        windowed=lambda block: block.self_attn.is_local,
    ),
    "gemma3_text": Family(
        norm="RMSNorm",
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        add=lambda _, own: own.clip_residual,
        gating=_geglu,
        windowed=lambda block: block.self_attn.is_sliding,
    ),
    "glm": Family(
        block="GLMBlock",
        attention="GLMAttention",
        mlp="GLMMLP",
        heads=("num_attention_heads", "num_key_value_heads"),
    ),
    "glm4": Family(
        block="Glm4DecoderLayer",
        attention="Glm4Attention",
        mlp="Glm4MLP",
        output_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "glm4_moe": Family(
        block="DecoderLayer",
        experts=Experts(cls="MoE", router_cls="MoEGate", shared="MLP"),
    ),
    "gpt_oss": Family(
        attention="AttentionBlock",
        mlp=None,
        heads=("num_attention_heads", "num_key_value_heads"),
        scale="sm_scale",
        windowed=lambda _: True,
        experts=Experts(
            cls="MLPBlock",
            routing=lambda experts: Routing(experts.num_experts_per_tok, last=True),
            router="router",
            layers="experts",
        ),
    ),
    "granite": Family(
        add=lambda block, _: ScaledResidualSum(block.residual_multiplier)
    ),
    "helium": Family(
        block="HeliumDecoderLayer", attention="HeliumAttention", mlp="HeliumMLP"
    ),
    "internlm3": Family(),
    "llama": Family(),
    "mimo": Family(),
    "mixtral": Family(
        block="MixtralDecoderLayer",
        attention="MixtralAttention",
        mlp=None,
        heads=("num_heads", "num_key_value_heads"),
        experts=Experts(
            cls="MixtralSparseMoeBlock",
            routing=lambda experts: Routing(experts.num_experts_per_tok),
            name="block_sparse_moe",
        ),
    ),
    "nanbeige": Family(),
    "olmo2": Family(
        norms=("", ""),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "olmo3": Family(
        block="Olmo3DecoderLayer",
        attention="Olmo3Attention",
        mlp="Olmo3MLP",
        heads=("num_attention_heads", "num_key_value_heads"),
        norms=("", ""),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        windowed=_has_sliding_window,
    ),
    "olmo_hybrid": Family(
        block="FullAttentionDecoderLayer",
        heads=("num_attention_heads", "num_key_value_heads"),
        norms=("", ""),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(
        block="Qwen2MoeDecoderLayer",
        mlp=None,
        experts=Experts(
            cls="Qwen2MoeSparseMoeBlock",
            routing=lambda experts: Routing(experts.top_k, of_all=True),
            shared="MLP",
        ),
    ),
    "qwen3": Family(),
    "qwen3_5": Family(
        block="DecoderLayer",
        heads=("num_attention_heads", "num_key_value_heads"),
        experts=Experts(cls="SparseMoeBlock", routing=_routing_of_qwen3, shared="MLP"),
        output_gate=True,
    ),
    "qwen3_moe": Family(
        block="Qwen3MoeDecoderLayer",
        experts=Experts(cls="Qwen3MoeSparseMoeBlock", routing=_routing_of_qwen3),
    ),
    "qwen3_next": Family(
        block="Qwen3NextDecoderLayer",
        attention="Qwen3NextAttention",
        mlp="Qwen3NextMLP",
        heads=("num_attention_heads", "num_key_value_heads"),
        experts=Experts(
            cls="Qwen3NextSparseMoeBlock",
            routing=_routing_of_qwen3,
            shared="Qwen3NextMLP",
        ),
        output_gate=True,
    ),
    "seed_oss": Family(),
    "telechat3": Family(
        block="Telechat3DecoderLayer",
        attention="Telechat3Attention",
        mlp="Telechat3MLP",
        heads=("num_attention_heads", "num_key_value_heads"),
    ),
}
"""Traceable families, by module of `mlx_lm.models`."""


def block_classes() -> set[type[nn.Module]]:
    """Returns the block classes of all families that are imported.

    Skips classes that were defined elsewhere and assigned to mlx-lm's name. Reports a
    family whose module has no class of the expected name.
    """
    classes: set[type[nn.Module]] = set()
    for name, family in FAMILIES.items():
        module = sys.modules.get(f"mlx_lm.models.{name}")
        if module is None:
            continue
        cls: Any = getattr(module, family.block, None)
        if cls is None:
            reason = f"{module.__name__} has no {family.block}"
            report_untraced(reason, f"decoder blocks of {name}")
        elif cls.__module__ == module.__name__:
            classes.add(cls)
    return classes


def family_of(module: ModuleType) -> Family:
    """Returns the family that a module of `mlx_lm.models` defines."""
    return FAMILIES[module.__name__.rpartition(".")[2]]
