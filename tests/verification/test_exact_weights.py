"""Weights are decoded in float64 without rounding, in every format."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mlx_marlin.checkpoints import gguf
from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight
from mlx_marlin.lm.verification import layers
from mlx_marlin.lm.verification.layers import ExactWeight
from support import format_cases
from support.format_cases import Weight, any_weight
from support.gguf_cases import CASES
from support.gguf_files import random_tensor, write_gguf
from support.profiles import sampled


def stored(weight: Weight, order: np.ndarray | None = None) -> StoredWeight:
    codes, scales, *biases = weight.native
    return StoredWeight(
        codes=codes,
        scales=scales,
        biases=biases[0] if biases else None,
        **weight.options,
        global_scale=weight.global_scale,
        input_order=None if order is None else mx.array(order.astype(np.int32)),
    )


def whole(weight: ExactWeight) -> tuple[np.ndarray, np.ndarray]:
    values, terms = np.full((2, *weight.shape), np.nan)
    for chunk in weight.chunks():
        values[chunk.matrix, chunk.rows] = chunk.values
        terms[chunk.matrix, chunk.rows] = chunk.terms
    return values, terms


@sampled(24)
@pytest.mark.parametrize(("mode", "bits", "group_size"), format_cases.GROUPED)
@pytest.mark.parametrize("packed", [False, True])
def test_every_format_is_decoded_exactly(
    monkeypatch: pytest.MonkeyPatch, mode: str, bits: int, group_size: int, packed: bool
) -> None:
    monkeypatch.setattr(layers, "MOST_WEIGHTS", 3000)  # 7 rows or so at a time
    k = 2 * format_cases.step_of(mode, bits, group_size)
    weight = any_weight(mode, bits, group_size, 37, k, dtype="bfloat16", seed=bits)
    order = np.random.default_rng(0).permutation(k)

    native = stored(weight, order)
    exact = ExactWeight(PackedLayer(native.packed(), native.input_order))
    values, terms = whole(exact if packed else ExactWeight(native))

    assert values.shape == (1, 37, k)
    assert np.array_equal(values[0][:, order], weight.decoded)
    scale, code, bias = weight.parts
    is_signed = mode == "k_quant" and bits in format_cases.SIGNED_K_QUANTS
    if mode == "symmetric" or is_signed:
        code, bias = code + 2 ** (bits - 1), -scale * 2 ** (bits - 1)
    assert np.array_equal(terms[0][:, order], (scale * code) ** 2 + bias**2)


def test_matrices_of_a_batch_are_decoded_as_asked() -> None:
    weights = [
        any_weight("affine", 4, 64, 8, 128, dtype="float16", seed=i) for i in range(3)
    ]
    batch = StoredWeight(
        codes=mx.stack([each.native[0] for each in weights]),
        scales=mx.stack([each.native[1] for each in weights]),
        biases=mx.stack([each.native[2] for each in weights]),
        **weights[0].options,
    )
    exact = ExactWeight(batch)
    chunks = [*exact.chunks({0, 2})]
    assert [chunk.matrix for chunk in chunks] == [0, 2]
    for chunk in chunks:
        assert np.array_equal(chunk.values, weights[chunk.matrix].decoded)


def test_global_scales_are_applied_in_float64() -> None:
    weight = any_weight("nvfp4", 4, 16, 8, 128, dtype="float16", seed=1)
    scales = mx.array([3.7, 0.01])
    batch = StoredWeight(
        codes=mx.stack([weight.native[0]] * 2),
        scales=mx.stack([weight.native[1]] * 2),
        **weight.options,
        global_scale=scales,
    )
    values, _ = whole(ExactWeight(batch))
    for matrix, scale in enumerate(np.array(scales).astype(np.float64)):
        assert np.allclose(values[matrix], weight.decoded * scale / 2688, 1e-15, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_plain_weights_are_what_they_are(dtype: str) -> None:
    w = mx.random.normal((5, 64)).astype(getattr(mx, dtype))
    values, terms = whole(ExactWeight(w))
    assert np.array_equal(values[0], np.array(w.astype(mx.float32)).astype(float))
    assert np.array_equal(terms, values**2)
    assert not ExactWeight(w).is_quantized


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_1"])
def test_weights_of_gguf_are_those_of_its_own_package(
    tmp_path: Path, kind: str
) -> None:
    random = np.random.default_rng(1)
    tensor = random_tensor("blk.0.attn_v.weight", kind, (24, 512), random)
    write_gguf(tmp_path / "a.gguf", CASES["llama"].metadata, [tensor])
    ((_, read),) = [(each.name, each.read()) for each in gguf.read(tmp_path / "a.gguf")]
    assert not isinstance(read, mx.array)
    expected = dequantize(
        np.frombuffer(tensor.data, np.uint8).reshape(24, -1), GGMLQuantizationType[kind]
    )

    for weight in (read, PackedLayer(read.packed())):
        values, terms = whole(ExactWeight(weight))
        error = np.abs(values[0] - expected)
        assert np.all(error <= 2.0**-23 * np.sqrt(terms[0]))
