"""Models of Q2_K to Q6_K and IQ4 tensors compute what the `gguf` package decodes."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.layers.packed_embedding import PackedEmbedding
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import float64_llama, oracles
from support.gguf_files import Written, plain_bytes, write_gguf
from support.gguf_models import permuted
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")

HIDDEN, WIDE, VOCABULARY, HEADS, LAYERS = 256, 512, 96, 4, 2
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}
SHAPES = {
    "self_attn.q_proj": ("attn_q", HIDDEN, HIDDEN),
    "self_attn.k_proj": ("attn_k", HIDDEN, HIDDEN),
    "self_attn.v_proj": ("attn_v", HIDDEN, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HIDDEN),
    "mlp.gate_proj": ("ffn_gate", WIDE, HIDDEN),
    "mlp.up_proj": ("ffn_up", WIDE, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, WIDE),
}
BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
BYTES |= {"IQ4_NL": 18, "IQ4_XS": 136}
FACTORS = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}
FACTORS |= {"IQ4_NL": 0, "IQ4_XS": 0}
"""Where a block has its float16 numbers: one or two."""
DEVIATIONS = {"Q3_K": 19 * 2.3, "Q6_K": 19 * 74, "IQ4_NL": 70, "IQ4_XS": 19 * 70}
"""Of random weights divided by d, where they have no minimum."""
TOKENS = np.array([3, 90, 17, 4, 55])


def blocks(random: np.random.Generator, kind: str, n: int, k: int) -> np.ndarray:
    """Returns random blocks whose weights have a standard deviation of about 0.05."""
    elements = 32 if kind == "IQ4_NL" else 256
    stored = random.integers(0, 256, (n, k // elements, BYTES[kind]), np.uint8)
    start = FACTORS[kind]
    if kind in DEVIATIONS:
        d = np.float16(0.05 / DEVIATIONS[kind])
        stored[..., start : start + 2] = np.array([d]).view(np.uint8)
    else:
        bits = int(kind[1])
        d = np.float16(0.05 / (8 if kind == "Q2_K" else 32) / 2**bits)
        middle = np.float16(d * 2 ** (bits - 1))
        pair = np.array([2 * d, 2 * middle], np.float16).view(np.uint8)
        stored[..., start : start + 4] = pair
    return stored.reshape(n, -1)


def write(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes a model with an embedding of Q6_K; returns its weights by name."""
    random = np.random.default_rng(1)
    tensors, exact = [], {}

    def add(name: str, stored_name: str, kind: str, n: int, k: int, heads: int) -> None:
        stored = blocks(random, kind, n, k)
        tensors.append(Written(f"{stored_name}.weight", kind, (n, k), stored.tobytes()))
        number = gguf.GGMLQuantizationType[kind]
        decoded = gguf.quants.dequantize(stored, number).astype(np.float64)
        if heads:
            order = permuted(np.arange(n)[:, None], heads)[:, 0]
            decoded = decoded[np.argsort(order)]
        exact[f"{name}.weight"] = decoded

    def add_norm(name: str, stored_name: str) -> None:
        weight = np.ones(HIDDEN, np.float32)
        data = plain_bytes("F32", weight)
        tensors.append(Written(f"{stored_name}.weight", "F32", (HIDDEN,), data))
        exact[f"{name}.weight"] = weight.astype(np.float64)

    add("model.embed_tokens", "token_embd", "Q6_K", VOCABULARY, HIDDEN, 0)
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for name, (stem, n, k) in SHAPES.items():
            heads = HEADS if stem in ("attn_q", "attn_k") else 0
            add(f"{ours}.{name}", f"{theirs}.{stem}", kind, n, k, heads)
        add_norm(f"{ours}.input_layernorm", f"{theirs}.attn_norm")
        add_norm(f"{ours}.post_attention_layernorm", f"{theirs}.ffn_norm")
    add_norm("model.norm", "output_norm")
    write_gguf(path, METADATA, tensors)
    return exact


@sampled(4)
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("optimized", [False, True])
def test_logits_are_those_of_a_float64_evaluation(
    kind: str, optimized: bool, tmp_path: Path
) -> None:
    exact = write(tmp_path / "model.gguf", kind)
    model = load_model(open_source(tmp_path / "model.gguf"))
    if optimized:
        mlx_marlin.optimize(model)

    logits = model(mx.array(TOKENS)[None])[0]

    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert logits.dtype == mx.float16
    expected = float64_llama.logits(CONFIG, exact, TOKENS)
    assert oracles.error(logits, expected) < 5e-3


@pytest.mark.parametrize("kind", ["Q6_K", "IQ4_NL", "IQ4_XS"])
def test_verify_checks_the_embedding_and_its_head(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", kind)

    model = load_model(open_source(tmp_path / "model.gguf"))
    report = mlx_marlin.verify(model, rows=(2,))

    assert report.passed, str(report)
    operations = {layer.operation for layer in report.layers}
    assert {"linear", "lookup", "head"} <= operations
