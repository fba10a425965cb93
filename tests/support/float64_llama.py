"""Llama in NumPy and float64: the logits that a checkpoint's weights stand for."""

from collections.abc import Callable
from functools import partial

import numpy as np

Weights = dict[str, np.ndarray]


def logits(config: dict, weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [length, vocabulary] of one sequence of tokens."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    epsilon = config["rms_norm_eps"]
    base = config.get("rope_theta", 10000.0)
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        own = partial(_named, weights, f"model.layers.{index}.")
        x = layer(x, own, heads, kv_heads, epsilon, rotated=size, base=base)
    x = normed(x, weights["model.norm.weight"], epsilon)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ head.T


def _named(weights: Weights, start: str, name: str) -> np.ndarray | None:
    return weights.get(start + name)


def layer(
    x: np.ndarray,
    weight: Callable[[str], np.ndarray | None],
    heads: int,
    kv_heads: int,
    epsilon: float,
    *,
    rotated: int,
    base: float,
) -> np.ndarray:
    """Returns what a layer makes of rows [length, width].

    `weight`: returns a tensor by its name in the layer, None if it has none. Twice as
    many rows of queries are queries and gates, head by head.
    `rotated`: the first numbers of a head that positions rotate.
    """

    def times(x: np.ndarray, name: str) -> np.ndarray:
        bias = weight(f"{name}.bias")
        y: np.ndarray = x @ weight(f"{name}.weight").T  # type: ignore[union-attr]
        return y if bias is None else y + bias

    def normed_heads(x: np.ndarray, name: str) -> np.ndarray:
        own = weight(f"self_attn.{name}_norm.weight")
        x = x if own is None else normed(x, own, epsilon)
        turned = _rotated(x[..., :rotated], base)
        return np.concatenate([turned, x[..., rotated:]], axis=-1)

    y = normed(x, weight("input_layernorm.weight"), epsilon)
    k, v = (times(y, f"self_attn.{n}_proj").reshape(len(x), kv_heads, -1) for n in "kv")
    q = times(y, "self_attn.q_proj").reshape(len(x), heads, -1)
    gate = q[..., k.shape[-1] :].reshape(len(x), -1)
    q, k = normed_heads(q[..., : k.shape[-1]], "q"), normed_heads(k, "k")
    k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
    attended = _attended(q, k, v)
    if gate.size:
        attended = attended / (1 + np.exp(-gate))
    x = x + times(attended, "self_attn.o_proj")
    y = normed(x, weight("post_attention_layernorm.weight"), epsilon)
    gate, up = times(y, "mlp.gate_proj"), times(y, "mlp.up_proj")
    return x + times(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")


def normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Rotates the halves of each head [length, heads, size] by their positions."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns causal attention [length, heads * size]."""
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(len(q), -1)
