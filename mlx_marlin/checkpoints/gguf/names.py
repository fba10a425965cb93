"""The parameters of mlx-lm's models that llama.cpp's tensors hold."""

import re
from typing import NamedTuple

from mlx_marlin.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    MIXTRAL,
    Architecture,
    Pieces,
)
from mlx_marlin.checkpoints.gguf.container import Container

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
        others = container.integer(key) if key in container.metadata else 0
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
