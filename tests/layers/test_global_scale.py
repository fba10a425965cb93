"""Linear layers with a global scale of nvfp4 run on our kernels."""

import copy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_marlin import dequantize, optimize, pack, quantize, restore
from mlx_marlin.backends import graph
from mlx_marlin.layers.joined import can_join, join, separate
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.checkpoints.saving import save
from mlx_marlin.weights.packed_weight import PackedWeight
from support import foreign_checkpoints as foreign
from support import oracles
from support.choose import Choose
from support.foreign_models import CONFIG, write_llama
from support.models import Layers, Tokenizer
from support.profiles import sampled

N, K = 96, 128


def packed_of(largest: float = 3.7, n: int = N, seed: int = 0) -> PackedWeight:
    w = mx.random.normal((n, K), key=mx.random.key(seed)) * 0.1
    return quantize(w, mode="nvfp4", global_scale=mx.array(largest))


def layer_of(largest: float = 3.7, n: int = N, seed: int = 0) -> MarlinLinear:
    return MarlinLinear.from_packed(packed_of(largest, n, seed))


def rows(m: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal((m, K), key=mx.random.key(9)).astype(dtype)


def exact(x: mx.array, layer: MarlinLinear) -> oracles.Floats:
    assert layer.packed is not None
    return oracles.exact(x) @ oracles.exact(dequantize(layer.packed, mx.float32)).T


@pytest.fixture(params=["kernels", "on_cpu", "stock"])
def served(request: pytest.FixtureRequest, backend: Choose) -> str:
    """Names what serves: Metal's kernels, CUDA's on a CPU, or stock MLX."""
    if request.param == "stock":
        backend("stock")
    else:
        request.getfixturevalue(request.param)
    name: str = request.param
    return name


@sampled(2, 4)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("m", [1, 7])
def test_a_product_has_the_global_scale(
    served: str, m: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []
    product = graph.product
    monkeypatch.setattr(
        graph,
        "product",
        lambda plan: launched.append(plan.problem.global_scale) or product(plan),
    )
    layer, x = layer_of(), rows(m, dtype)
    tolerance = oracles.TOLERANCES[str(dtype).removeprefix("mlx.core.")]
    y = layer(x)
    assert oracles.error(y, exact(x, layer)) < tolerance
    ours = served == "kernels" or (served == "on_cpu" and dtype != mx.float32)
    assert launched == [True] * ours
    both = layer.added(x, y)
    assert oracles.error(both, 2 * exact(x, layer)) < 2 * tolerance
    halves = layer.parts(x, (32, 64))
    assert [part.shape[-1] for part in halves] == [32, 64]
    assert oracles.error(mx.concatenate(halves, -1), exact(x, layer)) < tolerance
    gate, up = np.split(exact(x, layer), 2, axis=-1)
    gated = gate / (1 + np.exp(-gate)) * up
    assert oracles.error(layer.gated(x), gated) < 3 * tolerance


def test_layers_with_one_global_scale_are_joined(served: str) -> None:
    layers = [layer_of(seed=0), layer_of(n=64, seed=1)]
    x = rows(3)
    assert not can_join([layers[0], layer_of(5.0)])
    assert not can_join([layers[0], MarlinLinear(K, N, False, mode="nvfp4")])
    parts = join(layers)
    for part, layer in zip(parts, layers, strict=True):
        assert oracles.error(part(x), exact(x, layer)) < 1e-3
    for back, layer in zip(separate(parts[0].shared), layers, strict=True):
        assert {*back} == {"words", "packed_scales", "global_scale"}
        assert all(mx.array_equal(back[name], layer[name]) for name in back)


def test_the_scales_alone_are_not_given() -> None:
    layer = layer_of()
    assert layer.weight.shape == (N, K // 8)
    with pytest.raises(ValueError, match=r"global scale .* mlx_marlin\.dequantize"):
        _ = layer.scales
    with pytest.raises(ValueError, match="global scale"):
        MarlinLinear.from_quantized(layer, layout="mlx")


@pytest.mark.parametrize(
    "value", [mx.ones(1), mx.ones(2, mx.float16), mx.ones((2, 2)), 3.0]
)
def test_another_global_scale_has_the_same_shape(value: object) -> None:
    layer = layer_of()
    with pytest.raises(ValueError, match="global_scale of a packed MarlinLinear must"):
        layer.global_scale = value
    plain = MarlinLinear(K, N, False, mode="mxfp4", layout="marlin")
    with pytest.raises(ValueError, match="global_scale of a packed MarlinLinear must"):
        plain.global_scale = mx.ones(2)


@pytest.mark.usefixtures("kernels")
def test_the_global_scale_is_frozen_and_copied() -> None:
    layer = layer_of()
    assert not layer.trainable_parameters()
    twin = copy.deepcopy(layer)
    again = MarlinLinear.from_quantized(layer, layout="marlin", invariant=True)
    for other in (twin, again):
        assert mx.array_equal(other(rows(2)), layer(rows(2)))
        assert mx.array_equal(other["global_scale"], layer["global_scale"])


def test_a_model_is_optimized_and_restored(served: str) -> None:
    model, x = Layers(layer_of()), rows(2)
    before = model.layers[0]
    optimize(model, layout="mlx")
    assert model.layers[0].layout == "marlin"
    expected = exact(x, before)
    assert oracles.error(model(x), expected) < 1e-3
    with pytest.warns(RuntimeWarning, match="restore rounds weights"):
        restore(model)
    assert type(model.layers[0]) is nn.Linear
    assert model.layers[0].weight.dtype == mx.bfloat16
    assert oracles.error(model(x), expected) < 1e-2


def test_a_model_that_is_not_restored_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Layers(layer_of(n=K), layer_of()), rows(2)
    before = model(x)
    own = MarlinLinear.to_stock

    def fail_at_second(layer: MarlinLinear) -> nn.Module:
        if layer.output_dims == N:
            raise MemoryError
        return own(layer)

    monkeypatch.setattr(MarlinLinear, "to_stock", fail_at_second)
    with pytest.warns(RuntimeWarning, match="restore"), pytest.raises(MemoryError):
        restore(model)
    assert all(type(layer) is MarlinLinear for layer in model.layers)
    assert mx.array_equal(model(x), before)


def write_nvfp4(path: Path, *, stock: bool) -> dict[str, np.ndarray]:
    """Writes a llama in nvfp4 with global scales; returns its weights."""
    exact = {}

    def arrays(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
        w = mx.array(weight.values.astype(np.float32))
        largest = mx.abs(w).max()
        codes, scales = mx.quantize(w, 16, 4, "nvfp4", global_scale=largest)
        decoded = mx.dequantize(
            codes, scales, None, 16, 4, "nvfp4", global_scale=largest, dtype=mx.float32
        )
        exact[f"{layer}.weight"] = np.array(decoded, np.float64)
        if stock:
            parts = {"weight": codes, "scales": scales, "global_scale": largest[None]}
        else:
            parts = {
                "weight_packed": codes.view(mx.uint8),
                "weight_scale": scales,
                "weight_global_scale": (2688.0 / largest)[None],
            }
        return {f"{layer}.{name}": np.array(part) for name, part in parts.items()}

    format = {"mode": "nvfp4", "bits": 4, "group_size": 16}
    settings = {"quantization": format} if stock else foreign.nvfp4_config()
    return write_llama(path, arrays, settings, bits=4) | exact


TOKENS = mx.array([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("stock", [True, False], ids=["mlx", "compressed-tensors"])
def test_models_are_loaded_converted_and_saved(tmp_path: Path, stock: bool) -> None:
    weights = write_nvfp4(tmp_path / "source", stock=stock)
    rows = [*convert(open_source(tmp_path / "source"), tmp_path / "converted")]
    assert all(row.error == 0 for row in rows)
    model = load_model(open_source(tmp_path / "source"))
    save(tmp_path / "saved", model, Tokenizer())
    models = [
        model,
        load_model(open_source(tmp_path / "converted")),
        load_model(open_source(tmp_path / "saved")),
    ]
    before = dict(tree_flatten(model.parameters()))
    expected = decoded_logits(weights)
    for other in models:
        layer = other.model.layers[1].mlp.down_proj
        assert type(layer) is MarlinLinear
        assert layer["global_scale"].shape == (2,)
        after = dict(tree_flatten(other.parameters()))
        assert {*before} == {*after}
        assert all(mx.array_equal(before[name], after[name]) for name in before)
        assert oracles.error(other(TOKENS), expected) < 5e-3
    some = convert(
        open_source(tmp_path / "source"), tmp_path / "some", only="self_attn"
    )
    assert all(row.error == 0 for row in some)
    load_model(open_source(tmp_path / "some"))


def decoded_logits(weights: dict[str, np.ndarray]) -> np.ndarray:
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    named = [(name, mx.array(w.astype(np.float32))) for name, w in weights.items()]
    model.load_weights(named)
    return np.array(model(TOKENS), np.float64)


def test_restoring_codebooks_is_told_and_restoring_what_mlx_has_is_not() -> None:
    words, scales = mx.zeros((96, 16), mx.uint32), mx.ones((96, 2), mx.float16)
    of_mlx = pack(words, scales, scales, group_size=64, bits=4)
    restore(Layers(MarlinLinear.from_packed(of_mlx)))  # without a warning

    codebook = mx.arange(16.0)
    packed = pack(words, scales, group_size=64, mode="codebook", codebook=codebook)
    with pytest.warns(RuntimeWarning, match="restore rounds weights"):
        restore(Layers(MarlinLinear.from_packed(packed)))
