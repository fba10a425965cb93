"""Embeddings in formats that MLX lacks are decoded to the model's dtype."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.integrations.mlx_lm import warn_once
from mlx_marlin.integrations.mlx_lm.checkpoints.gguf_source import open_source
from mlx_marlin.integrations.mlx_lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support.foreign_models import HIDDEN, VOCABULARY, write_llama

LAYER = "model.embed_tokens"


def written(
    path: Path, dtype: mx.Dtype, factor: float, *, act_order: bool = False
) -> np.ndarray:
    """Writes a model with a GPTQ embedding; returns its values."""
    write_llama(
        path,
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        bits=4,
    )
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
    warn_once.forget()
    name = str(expected).removeprefix("mlx.core.")
    with pytest.warns(RuntimeWarning, match=f"{LAYER}: .* is decoded to {name}"):
        model = load_model(open_source(tmp_path))
    rows = model.model.embed_tokens.weight
    assert rows.dtype == expected
    rounded = mx.array(values.astype(np.float32)).astype(expected)
    assert mx.array_equal(rows, rounded)


def test_act_order_is_refused(tmp_path: Path) -> None:
    written(tmp_path, mx.float16, 1, act_order=True)
    with pytest.raises(ValueError, match=rf"tensor '{LAYER}\.weight'.*act-order"):
        load_model(open_source(tmp_path))
