"""A small llama whose linear layers are stored in foreign formats, and its weights."""

from collections.abc import Callable
from pathlib import Path

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


def write_llama(
    path: Path, arrays: Arrays, settings: dict, **options: object
) -> dict[str, np.ndarray]:
    """Writes the model; returns all weights by mlx-lm's names in float64.

    Args:
        path: The folder to make.
        arrays: Writes a weight in the format.
        settings: The config of the format, with its `quantization_config`;
            it may set `vocab_size`.
        **options: Those of `foreign.drawn_weight`.
    """
    rng = np.random.default_rng(0)
    exact, stored = {}, {}

    def plain(name: str, *shape: int) -> None:
        values = (rng.normal(size=shape) * 0.5 + (len(shape) == 1)).astype(np.float16)
        stored[name], exact[name] = values, values.astype(np.float64)

    vocabulary = settings.get("vocab_size", VOCABULARY)
    plain("model.embed_tokens.weight", vocabulary, HIDDEN)
    plain("model.norm.weight", HIDDEN)
    plain("lm_head.weight", vocabulary, HIDDEN)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        plain(f"{start}.input_layernorm.weight", HIDDEN)
        plain(f"{start}.post_attention_layernorm.weight", HIDDEN)
        for name, (n, k) in LINEAR.items():
            weight = foreign.drawn_weight(rng, n, k, 64, **options)
            weight.scales = (weight.scales / 16).astype(np.float16)
            stored |= arrays(f"{start}.{name}", weight)
            exact[f"{start}.{name}.weight"] = weight.values
    foreign.Folder({**CONFIG, **settings}, stored).write(path)
    (path / "tokenizer_config.json").write_text("{}")
    return exact


def write_gptq(path: Path) -> None:
    """Writes the model as GPTQ does, with zero points of version 2."""
    write_llama(
        path,
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        bits=4,
    )
