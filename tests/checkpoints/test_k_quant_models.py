"""Models of Q2_K to Q6_K and IQ4 tensors compute what the `gguf` package decodes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.checkpoints import gguf
from mlx_marlin.layers.packed_embedding import PackedEmbedding
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import float64_llama, foreign_models, oracles
from support.gguf_blocks import draw_blocks
from support.gguf_models import write_llama
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")

HIDDEN, WIDE = 256, 512
CONFIG: dict[str, Any] = foreign_models.CONFIG | {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
DEVIATIONS = {"Q3_K": 19 * 2.3, "Q6_K": 19 * 74, "IQ4_NL": 70, "IQ4_XS": 19 * 70}
"""Of random weights divided by d, where they have no minimum."""
KINDS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
TOKENS = np.array([3, 60, 17, 4, 55])


def scales(kind: str) -> tuple[float, ...]:
    """Returns d, or d and dmin, of weights with a standard deviation of about 0.05."""
    if kind in DEVIATIONS:
        return (0.05 / DEVIATIONS[kind],)
    bits = int(kind[1])
    d = 0.1 / (8 if kind == "Q2_K" else 32) / 2**bits
    return d, d * 2 ** (bits - 1)


def write(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes a model with an embedding of Q6_K; returns its weights by name."""
    random = np.random.default_rng(1)
    weights = {}
    for name, shape in foreign_models.shapes(CONFIG).items():
        own = "Q6_K" if name == "model.embed_tokens" else kind
        if len(shape) == 1:
            weights[f"{name}.weight"] = "F32", np.ones(shape, np.float32)
        else:
            octets = draw_blocks(own, shape, random, scales(own))
            weights[f"{name}.weight"] = own, octets
    return write_llama(path, CONFIG, weights)


def assert_same(model: nn.Module, exact: dict[str, np.ndarray]) -> None:
    """The logits are those of a float64 evaluation."""
    logits = model(mx.array(TOKENS)[None])[0]
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert logits.dtype == mx.float16
    expected = float64_llama.logits(CONFIG, exact, TOKENS)
    assert oracles.error(logits, expected) < 5e-3


@sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimized", [False, True])
def test_logits_are_those_of_a_float64_evaluation(
    kind: str, optimized: bool, tmp_path: Path
) -> None:
    exact = write(tmp_path / "model.gguf", kind)
    model = load_model(open_source(tmp_path / "model.gguf"))
    if optimized:
        mlx_marlin.optimize(model)

    assert_same(model, exact)


@sampled(1)
@pytest.mark.parametrize("kind", ["Q6_K", "IQ4_NL", "IQ4_XS"])
def test_a_converted_model_is_verified_with_its_embedding_and_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {})
    exact = write(tmp_path / "model.gguf", kind)
    [*convert(open_source(tmp_path / "model.gguf"), tmp_path / "folder")]

    model = load_model(open_source(tmp_path / "folder"))
    report = mlx_marlin.verify(model, rows=(2,))

    assert_same(model, exact)
    assert report.passed, str(report)
    operations = {layer.operation for layer in report.layers}
    assert {"linear", "lookup", "head"} <= operations
