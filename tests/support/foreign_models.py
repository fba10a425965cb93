"""A small llama whose linear layers are stored in foreign formats, and its weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support import foreign_checkpoints as foreign

HIDDEN, FEATURES, HEADS, LAYERS, VOCABULARY = 128, 256, 4, 2, 64
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FEATURES,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEATURES, HIDDEN),
    "mlp.up_proj": (FEATURES, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEATURES),
}
"""Rows and columns of a decoder layer's weights."""

Arrays = Callable[[str, foreign.IntegerWeight], dict[str, np.ndarray]]


class Format(NamedTuple):
    """A format of layers."""

    arrays: Arrays  # Writes a weight in it
    settings: dict[str, Any]  # What config.json says of it
    options: dict[str, Any]  # Those of `foreign.drawn_weight`


def _plain(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
    return {f"{layer}.weight": weight.values.astype(np.float16)}


_GPTQ, _GPTQ_1 = (partial(foreign.gptq_arrays, version=i) for i in (2, 1))
_COMPRESSED = partial(foreign.compressed_arrays, symmetric=False)
_SYMMETRIC = partial(foreign.compressed_arrays, symmetric=True)
FORMATS = {
    "gptq": Format(_GPTQ, foreign.gptq_config(4, 2), {"bits": 4}),
    "gptq-3": Format(_GPTQ_1, foreign.gptq_config(3, 1), {"bits": 3, "least_zero": 1}),
    "gptq-act-order": Format(
        _GPTQ_1,
        foreign.gptq_config(4, 1),
        {"bits": 4, "act_order": True, "least_zero": 1},
    ),
    "awq": Format(foreign.awq_arrays, foreign.awq_config(), {"bits": 4}),
    "compressed": Format(_COMPRESSED, foreign.compressed_config(3), {"bits": 3}),
    "symmetric": Format(
        _SYMMETRIC,
        foreign.compressed_config(5, symmetric=True),
        {"bits": 5, "symmetric": True},
    ),
}
PLAIN = Format(_plain, {}, {"bits": 8})


def write(path: Path, name: str, **settings: object) -> dict[str, np.ndarray]:
    """Writes the model in a format of `FORMATS`, or plain; returns its weights."""
    format = PLAIN if name == "plain" else FORMATS[name]
    said = format.settings | settings
    return write_llama(path, format.arrays, said, **format.options)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight of a llama with as many heads as key heads."""
    hidden, features = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head"] = (config["vocab_size"], hidden)
    sizes = {HIDDEN: hidden, FEATURES: features}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        found[f"{start}.input_layernorm"] = (hidden,)
        found[f"{start}.post_attention_layernorm"] = (hidden,)
        for name, shape in LINEAR.items():
            found[f"{start}.{name}"] = tuple(sizes[size] for size in shape)
    return found


def write_llama(
    path: Path, arrays: Arrays, settings: dict, **options: object
) -> dict[str, np.ndarray]:
    """Writes the model; returns all weights by mlx-lm's names in float64."""
    rng = np.random.default_rng(0)
    exact, stored = {}, {}
    config = {**CONFIG, **settings}
    for name, shape in shapes(config | {"num_hidden_layers": LAYERS}).items():
        parameter = f"{name}.weight"
        if name.endswith("_proj"):
            weight = foreign.drawn_weight(rng, *shape, 64, **options)
            weight.scales = (weight.scales / 16).astype(np.float16)
            stored |= arrays(name, weight)
            exact[parameter] = weight.values
        else:
            values = rng.normal(size=shape) * 0.5 + (len(shape) == 1)
            stored[parameter] = values.astype(np.float16)
            exact[parameter] = stored[parameter].astype(np.float64)
    foreign.Folder(config, stored).write(path)
    (path / "tokenizer_config.json").write_text("{}")
    return exact
