"""Decoder blocks of mlx-lm that traced graphs stand for, by family.

A family is here if its blocks compute as llama's do: two norms, two sums, and in
between attention and an MLP. Norms may stand before these, or after them, and their
results may be added in other ways. Nothing here imports a family: a module that nobody
imported has no blocks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.mlx_lm.tracing_code import report_untraced
from mlx_marlin.integrations.tracing.routing import Routing

Merge = Callable[[mx.array, mx.array], mx.array]
"""Of two arrays one: how they are added, or gated. Equal ones share graphs."""


@dataclass(frozen=True, slots=True)
class Multiplied:
    """How granite's blocks add to the residual: after a factor.

    Attributes:
        factor: What is added is multiplied by it.
    """

    factor: float

    def __call__(self, residual: mx.array, y: mx.array) -> mx.array:
        """Returns the sum."""
        return residual + y * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a family's blocks may have in the place of an MLP.

    It computes `(layers(x, indices) * scores[..., None]).sum(-2)`, with indices and
    scores of `router(x)`, plus what a shared expert makes of x if it has one.

    Attributes:
        cls: Its class.
        routing: From one of these modules, how its rows choose experts.
        router: What it calls the layer that experts are chosen by.
        layers: What it calls the experts.
        place: What a block calls it.
        shared: The class of a shared expert, `shared_expert`, which is multiplied by
            the sigmoid of `shared_expert_gate`; None without one.
    """

    cls: str
    routing: Callable[[Any], Routing]
    router: str = "gate"
    layers: str = "switch_mlp"
    place: str = "mlp"
    shared: str | None = None


def _says_use_sliding(block: Any) -> bool:
    return bool(getattr(block, "use_sliding", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one of mlx-lm's modules calls the parts of a block.

    Attributes:
        block: The class of a block.
        attention: The class of its attention.
        mlp: The class of its MLP; None if it has none.
        heads: Attributes of attention: heads of q, and of k and v.
        scale: Attribute of attention: the factor of q times k.
        windowed: Of a block, whether its mask may hide tokens that are far behind.
        experts: What it may have in the place of an MLP.
        norm: The class of its norms, if not MLX's.
        norms: What a block calls those before attention and the MLP; "" without.
        closing: Likewise, those of what is added to the residual: of attention's result
            and of the MLP's. What experts return has none.
        add: From a block and its module, how both results are added to the residual, if
            not as they are; what experts return is added as it is.
        gate: What the MLP makes of gate and up, if not swiglu.
    """

    block: str = "TransformerBlock"
    attention: str = "Attention"
    mlp: str | None = "MLP"
    heads: tuple[str, str] = ("n_heads", "n_kv_heads")
    scale: str = "scale"
    windowed: Callable[[Any], bool] = _says_use_sliding
    experts: Experts | None = None
    norm: str | None = None
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    closing: tuple[str, str] = ("", "")
    add: Callable[[Any, ModuleType], Merge] | None = None
    gate: Merge | None = None

    @property
    def place(self) -> str:
        """What a block calls its MLP, or its experts."""
        return "mlp" if self.experts is None else self.experts.place


def _geglu(gate: mx.array, up: mx.array) -> mx.array:
    y: mx.array = nn.gelu_approx(gate) * up
    return y


def _is_no_full_attention(block: Any) -> bool:
    kind: str = block.args.layer_types[block.self_attn.layer_idx]
    return kind != "full_attention"


def _of_all_or_chosen(experts: Any) -> Routing:
    return Routing(experts.top_k, of_all=not experts.norm_topk_prob, last=True)


FAMILIES = {
    "ernie4_5": Family(block="DecoderLayer"),
    "exaone4": Family(
        norms=("", ""),
        closing=("post_attention_layernorm", "post_feedforward_layernorm"),
        windowed=lambda block: block.self_attn.is_local,
    ),
    "gemma3_text": Family(
        norm="RMSNorm",
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        closing=("post_attention_layernorm", "post_feedforward_layernorm"),
        add=lambda _, own: own.clip_residual,
        gate=_geglu,
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
        closing=("post_self_attn_layernorm", "post_mlp_layernorm"),
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
    "granite": Family(add=lambda block, _: Multiplied(block.residual_multiplier)),
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
            place="block_sparse_moe",
        ),
    ),
    "nanbeige": Family(),
    "olmo2": Family(
        norms=("", ""),
        closing=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "olmo3": Family(
        block="Olmo3DecoderLayer",
        attention="Olmo3Attention",
        mlp="Olmo3MLP",
        heads=("num_attention_heads", "num_key_value_heads"),
        norms=("", ""),
        closing=("post_attention_layernorm", "post_feedforward_layernorm"),
        windowed=_is_no_full_attention,
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
    "qwen3_moe": Family(
        block="Qwen3MoeDecoderLayer",
        experts=Experts(cls="Qwen3MoeSparseMoeBlock", routing=_of_all_or_chosen),
    ),
    "seed_oss": Family(),
    "telechat3": Family(
        block="Telechat3DecoderLayer",
        attention="Telechat3Attention",
        mlp="Telechat3MLP",
        heads=("num_attention_heads", "num_key_value_heads"),
    ),
}
"""Modules of `mlx_lm.models`."""


def known_blocks() -> set[type[nn.Module]]:
    """Returns the blocks' classes of all families that somebody imported.

    A class that took the place of mlx-lm's own is not among them. A family that mlx-lm
    no longer has such a class of is reported.
    """
    known: set[type[nn.Module]] = set()
    for name, family in FAMILIES.items():
        module = sys.modules.get(f"mlx_lm.models.{name}")
        if module is None:
            continue
        cls: Any = getattr(module, family.block, None)
        if cls is None:
            reason = f"{module.__name__} has no {family.block}"
            report_untraced(reason, f"decoder blocks of {name}")
        elif cls.__module__ == module.__name__:
            known.add(cls)
    return known


def family_of(own: ModuleType) -> Family:
    """Returns the family of one of mlx-lm's modules."""
    return FAMILIES[own.__name__.rpartition(".")[2]]
