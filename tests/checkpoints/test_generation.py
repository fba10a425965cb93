"""Models in each format compute and write what their weights say in float64."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin.backends import graph
from mlx_marlin.checkpoints import gguf
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import float64_llama, foreign_models, oracles
from support import foreign_checkpoints as foreign
from support.gguf_blocks import draw_blocks
from support.gguf_models import write_llama
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")

DEMO = Path(__file__).parents[2] / "examples/tiny_llama/model"
CONFIG = json.loads((DEMO / "config.json").read_text())
PROMPT = np.array([5, 300, 12, 77, 410, 9])
COUNT = 6
TIE = 0.05
"""Two logits that differ by less may change places: those of float16 are off by some
hundredths."""


def rounded(
    w: np.ndarray, bits: int = 4, *, symmetric: bool = False, act_order: bool = False
) -> foreign.IntegerWeight:
    """Rounds a weight to nearest, in groups of 64, perhaps of columns in any order."""
    n, k = w.shape
    columns = np.arange(k, dtype=np.int32) // 64
    if act_order:
        columns = np.random.default_rng(0).permutation(columns)
    order = np.argsort(columns, kind="stable")
    groups = w[:, order].reshape(n, -1, 64)
    most, zero = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = np.abs(groups).max(-1) / (zero - 1)
        zeros = np.full(scales.shape, zero)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / most
        zeros = np.clip(np.rint(-low / scales), 1, most).astype(int)
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float64)[..., None]
    codes = np.clip(np.rint(groups / wide) + zeros[..., None], 0, most).astype(int)
    back = np.empty((n, k), int)
    back[:, order] = codes.reshape(n, k)
    return foreign.IntegerWeight(back, scales, zeros, bits, columns)


GPTQ_1, GPTQ_2 = (partial(foreign.gptq_arrays, version=i) for i in (1, 2))
FORMATS = {
    "gptq version 1": (GPTQ_1, foreign.gptq_config(4, 1), {}),
    "gptq 8 bits": (GPTQ_2, foreign.gptq_config(8, 2), {"bits": 8, "symmetric": True}),
    "gptq act-order": (GPTQ_2, foreign.gptq_config(4, 2), {"act_order": True}),
    "awq": (foreign.awq_arrays, foreign.awq_config(), {}),
    "compressed-tensors": (
        partial(foreign.compressed_arrays, symmetric=False),
        foreign.compressed_config(5),
        {"bits": 5},
    ),
}


def written(path: Path, name: str) -> dict[str, np.ndarray]:
    """Writes the demo's model in a format; returns its weights, dequantized."""
    arrays, settings, options = FORMATS[name]
    stored, exact = {}, {}
    for parameter, array in mx.load(str(DEMO / "model.safetensors")).items():
        w = np.array(array, np.float64)
        if "_proj" in parameter:
            weight = rounded(w, **options)
            stored |= arrays(parameter.removesuffix(".weight"), weight)
            exact[parameter] = weight.values
        else:
            stored[parameter], exact[parameter] = w.astype(np.float16), w
    foreign.Folder(settings | CONFIG, stored).write(path)
    return exact


def generated(model: Any, count: int = COUNT) -> list[int]:
    cache = make_prompt_cache(model)
    tokens, given = [], mx.array(PROMPT)[None]
    for _ in range(count):
        best = int(model(given, cache=cache)[0, -1].argmax().item())
        tokens.append(best)
        given = mx.array([[best]])
    return tokens


def check_tokens(tokens: list[int], exact: dict[str, np.ndarray]) -> None:
    """Each token is the best in float64 after those before it, up to ties."""
    sequence = np.array([*PROMPT, *tokens])
    logits = float64_llama.logits(CONFIG, exact, sequence)[len(PROMPT) - 1 : -1]
    best = logits.max(-1)
    behind = best - logits[np.arange(len(tokens)), tokens]
    ties = [(i, float(lead)) for i, lead in enumerate(behind) if lead > 0]
    assert all(lead < TIE for _, lead in ties), ties
    assert len(ties) <= 1, ties


@sampled(2, 8)
@pytest.mark.parametrize("served", ["kernels", "stock", "on_cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_writes_what_its_weights_say(
    tmp_path: Path, request: pytest.FixtureRequest, served: str, name: str
) -> None:
    request.getfixturevalue(served)
    exact = written(tmp_path, name)
    check_tokens(generated(load_model(open_source(tmp_path))), exact)
    assert bool(graph.plans_built()) is (served != "stock")


def test_another_weight_writes_something_else(tmp_path: Path) -> None:
    exact = written(tmp_path, "awq")
    tokens = generated(load_model(open_source(tmp_path)))
    exact["model.layers.2.mlp.down_proj.weight"] *= -1
    with pytest.raises(AssertionError):
        check_tokens(tokens, exact)


SMALL: dict[str, Any] = foreign_models.CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
DEVIATIONS = {"Q3_K": 19 * 2.3, "Q6_K": 19 * 74, "IQ4_NL": 70, "IQ4_XS": 19 * 70}
DEVIATIONS |= {"Q4_0": 4.6, "Q5_0": 9.2, "Q8_0": 74}
"""Of random weights divided by d, where they have no minimum."""
KINDS = [*DEVIATIONS, "Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"]
TOKENS = np.array([3, 60, 17, 4, 55])


def scales(kind: str) -> tuple[float, ...]:
    """Returns d, or d and dmin, of weights with a standard deviation of about 0.05."""
    if kind in DEVIATIONS:
        return (0.05 / DEVIATIONS[kind],)
    bits = int(kind[1])
    if kind.endswith("_1"):  # with a summand, which stock MLX rounds
        return 0.17 / 2**bits, -0.085
    d = 0.1 / (8 if kind == "Q2_K" else 32) / 2**bits
    return d, d * 2 ** (bits - 1)


def written_gguf(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes a model with an embedding of Q6_K; returns its weights by name."""
    random = np.random.default_rng(1)
    weights = {}
    for name, shape in foreign_models.shapes(SMALL).items():
        own = "Q6_K" if name == "model.embed_tokens" else kind
        if len(shape) == 1:
            weights[f"{name}.weight"] = "F32", np.ones(shape, np.float32)
        else:
            octets = draw_blocks(own, shape, random, scales(own))
            weights[f"{name}.weight"] = own, octets
    return write_llama(path, SMALL, weights)


def assert_same(model: nn.Module, exact: dict[str, np.ndarray]) -> None:
    """The logits are those of a float64 evaluation."""
    logits = model(mx.array(TOKENS)[None])[0]
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert logits.dtype == mx.float16
    expected = float64_llama.logits(SMALL, exact, TOKENS)
    assert oracles.error(logits, expected) < 1e-2


@sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimized", [False, True])
def test_logits_are_those_of_a_float64_evaluation(
    kind: str, optimized: bool, tmp_path: Path
) -> None:
    exact = written_gguf(tmp_path / "model.gguf", kind)
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
    exact = written_gguf(tmp_path / "model.gguf", kind)
    [*convert(open_source(tmp_path / "model.gguf"), tmp_path / "folder")]

    model = load_model(open_source(tmp_path / "folder"))
    report = mlx_marlin.verify(model, rows=(2,))

    assert_same(model, exact)
    assert report.passed, str(report)
    operations = {layer.operation for layer in report.layers}
    assert {"linear", "lookup", "head"} <= operations
