"""Embeddings in formats that MLX lacks stay packed, and are saved and loaded so."""

import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import _embedding, _largest, load_model
from support import foreign_checkpoints as foreign
from support.foreign_models import HIDDEN, VOCABULARY, write
from support.models import Tokenizer

LAYER = "model.embed_tokens"


def written(
    path: Path, dtype: mx.Dtype, factor: float, *, act_order: bool = False
) -> np.ndarray:
    """Writes a model with a GPTQ embedding; returns its values."""
    write(path, "gptq")
    file = str(path / "model.safetensors")
    arrays = {
        name: array if array.dtype == mx.int32 else array.astype(dtype)
        for name, array in mx.load(file).items()
    }
    weight = foreign.drawn_weight(
        np.random.default_rng(1), VOCABULARY, HIDDEN, 64, 4, act_order=act_order
    )
    scales = mx.array(weight.scales.astype(np.float32) * factor).astype(dtype)
    weight.scales = np.array(scales.astype(mx.float32))
    stored = {n: mx.array(a) for n, a in foreign.gptq_arrays(LAYER, weight, 2).items()}
    stored[f"{LAYER}.scales"] = scales.T
    arrays.pop(f"{LAYER}.weight")
    mx.save_safetensors(file, {**arrays, **stored})
    return weight.values


@pytest.mark.parametrize(
    ("dtype", "factor", "expected"),
    [
        (mx.float16, 1, mx.float16),
        (mx.float16, 1e5, mx.float32),
        (mx.bfloat16, 1, mx.bfloat16),
        (mx.bfloat16, 1e6, mx.bfloat16),
    ],
)
def test_rows_are_rounded_once_to_the_dtype_of_the_model(
    tmp_path: Path, dtype: mx.Dtype, factor: float, expected: mx.Dtype
) -> None:
    values = written(tmp_path, dtype, factor)
    layer = load_model(open_source(tmp_path)).model.embed_tokens
    rows = layer(mx.arange(VOCABULARY))
    assert isinstance(layer, PackedEmbedding)
    assert rows.dtype == expected
    rounded = mx.array(values.astype(np.float32)).astype(expected)
    assert mx.array_equal(rows, rounded)


def test_a_packed_embedding_is_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    written(tmp_path / "gptq", mx.float16, 1)
    model = load_model(open_source(tmp_path / "gptq"))

    mlx_marlin.save(tmp_path / "ours", model, Tokenizer())
    again = load_model(open_source(tmp_path / "ours"))

    for part in ("words", "packed_scales"):
        stored = model.model.embed_tokens[part]
        assert mx.array_equal(again.model.embed_tokens[part], stored)
    tokens = mx.array([[0, 5, 9]])
    assert mx.array_equal(again(tokens), model(tokens))


def test_optimize_keeps_it_and_restore_decodes_it(tmp_path: Path) -> None:
    written(tmp_path, mx.float16, 1)
    model = load_model(open_source(tmp_path))
    tokens = mx.array([[0, 5, 9]])
    expected = model(tokens)

    mlx_marlin.optimize(model)

    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert mx.allclose(model(tokens), expected, rtol=1e-2, atol=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zero points are rounded
        mlx_marlin.restore(model)
    assert mx.allclose(model(tokens), expected, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("symmetric", {}),
        ("zero_point", {"biases": (0.0, 15.0)}),
        ("affine", {"biases": (-100.0, -200.0)}),
        ("codebook", {"codebook": (-4.0, 1.0, *[0.5] * 13, 3.0)}),
    ],
)
def test_no_value_of_an_embedding_is_above_its_bound(
    mode: str, more: dict[str, tuple[float, ...]]
) -> None:
    own = {name: mx.array(values, mx.float32) for name, values in more.items()}
    if "biases" in own:
        own["biases"] = own["biases"].reshape(2, 1)
    scales = mx.array([[3.0], [-20.0]])
    values, bounds = [], []
    for code in (0, 0x77777777, 0xFFFFFFFF):
        codes = mx.full((2, 8), code, mx.uint32)
        stored = StoredWeight(
            codes=codes, scales=scales, group_size=64, bits=4, mode=mode, **own
        )
        bounds.append(_largest(stored))
        values.append(stored.decoded())
        layer = _embedding(nn.Embedding(2, 64), stored, "", mx.float16)
        assert mx.allclose(layer(mx.arange(2)), values[-1], rtol=1e-3)
    largest = mx.abs(mx.stack(values)).max().item()
    assert bounds[0] == bounds[1] == bounds[2]
    assert largest <= bounds[0] <= 2 * largest


def test_act_order_is_refused(tmp_path: Path) -> None:
    written(tmp_path, mx.float16, 1, act_order=True)
    with pytest.raises(ValueError, match=rf"tensor '{LAYER}\.weight'.*act-order"):
        load_model(open_source(tmp_path))
