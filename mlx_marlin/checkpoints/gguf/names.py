"""The parameters of mlx-lm's models that llama.cpp's tensors hold."""

import re

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
        return MIXTRAL
    return ARCHITECTURES[name]


def pieces_of(
    architecture: Architecture, name: str, layers: int, with_keys: int
) -> Pieces:
    """Returns the parameters that a tensor holds, and the rules of their rows.

    There are none if the tensor belongs to the configuration, to a layer after the last
    one, which predicts further tokens, or to keys that a layer takes from another one.

    Args:
        architecture: The architecture.
        name: Name in llama.cpp, such as "blk.0.attn_q.weight".
        layers: Decoder layers.
        with_keys: Decoder layers with keys of their own, the first ones.

    Raises:
        ValueError: If mlx-lm's model has no such parameter.
    """
    pattern = r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([\w.]+?)(?:\.(weight|bias))?"
    parts = re.fullmatch(pattern, name)
    if parts is not None:
        layer, stem, suffix = parts.groups()
        if layer is None and stem in FREQUENCY_FACTORS and suffix == "weight":
            return ()
        last = with_keys if stem in architecture.shared_keys else layers
        if layer is not None and int(layer) >= last:
            return ()
        found = (architecture.ends if layer is None else architecture.block).get(stem)
        if found is not None and (suffix is None) == (stem in _WHOLE):
            prefix = "" if layer is None else f"model.layers.{layer}."
            own = ((found, ""),) if isinstance(found, str) else found
            end = "" if stem in _NO_SUFFIX else f".{suffix}"
            return tuple(
                (f"{architecture.inside}{prefix}{module}{end}", rule)
                for module, rule in own
            )
    raise ValueError(f"mlx-lm's {architecture.model_type!r} has no such parameter")
