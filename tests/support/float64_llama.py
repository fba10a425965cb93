"""Llama in NumPy and float64: the logits that a checkpoint's weights stand for."""

import numpy as np

Weights = dict[str, np.ndarray]


def logits(config: dict, weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [length, vocabulary] of one sequence of tokens."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    epsilon = config["rms_norm_eps"]
    base = config.get("rope_theta", 10000.0)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"

        def times(x: np.ndarray, name: str, start: str = start) -> np.ndarray:
            return x @ weights[f"{start}.{name}.weight"].T

        y = _normed(x, weights[f"{start}.input_layernorm.weight"], epsilon)
        q, k, v = (
            times(y, f"self_attn.{name}_proj").reshape(len(x), -1, size)
            for name in "qkv"
        )
        q, k = _rotated(q, base), _rotated(k, base)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        x = x + times(_attended(q, k, v), "self_attn.o_proj")
        y = _normed(x, weights[f"{start}.post_attention_layernorm.weight"], epsilon)
        gate, up = times(y, "mlp.gate_proj"), times(y, "mlp.up_proj")
        x = x + times(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    x = _normed(x, weights["model.norm.weight"], epsilon)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ head.T


def _normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
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
