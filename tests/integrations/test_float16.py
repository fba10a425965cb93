"""`optimize(compute="float16")` converts bfloat16 models, and `restore` gives back."""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_marlin
from mlx_marlin.lm import float16
from mlx_marlin.lm.module_tree import Changes
from support.decoder_models import (
    Caches,
    decoded,
    one_stream,
    quantized,
    rotating,
    rotating_batch,
    tiny,
    with_left_padding,
)
from support.models import LAYOUTS, Layers, arrays, assert_same_model, types
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("stock", "unfused")

WAYS: list[dict[str, Any]] = [
    {},
    {"layout": "marlin"},
    {"layout": "marlin", "join": True, "trace": True},
]
SMALL = [0.0, -0.0, 1e-7, 3e-6, -5e-5, 6.2e-5]


def in_bfloat16(family: str = "llama", **options: Any) -> nn.Module:
    """Returns a small model with a few elements that float16 rounds."""
    model = tiny(family, mx.bfloat16, **options)
    norm = model.layers[0].input_layernorm
    norm.weight[: len(SMALL)] = mx.array(SMALL, mx.bfloat16)
    scales = model.layers[1].self_attn.o_proj.scales
    scales[0, :2] = mx.array(SMALL[2:4], mx.bfloat16)
    mx.eval(model.parameters())
    return model


def bits(model: nn.Module) -> dict[str, Any]:
    return {path: array.view(mx.uint8) for path, array in arrays(model).items()}


def assert_same_bits(actual: nn.Module, expected: nn.Module) -> None:
    assert_same_model(actual, expected)
    assert_bits(actual, bits(expected))
    assert vars(actual).keys() == vars(expected).keys()


def assert_bits(model: nn.Module, expected: dict[str, Any]) -> None:
    found = bits(model)
    assert [*found] == [*expected]
    for path, own in expected.items():
        assert mx.array_equal(found[path], own), path


def error(outputs: list[mx.array], exact: list[mx.array]) -> float:
    total = [mx.concatenate([y.flatten() for y in of]) for of in (outputs, exact)]
    ours, own = (y.astype(mx.float32) for y in total)
    return float(mx.linalg.norm(ours - own) / mx.linalg.norm(own))


@sampled(2, 6)
@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("llama", one_stream),
        ("llama", with_left_padding),
        ("llama", rotating),
        ("llama", rotating_batch),
        ("qwen3_moe", one_stream),
        ("gpt_oss", one_stream),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_logits_are_nearer_to_those_of_float32(
    family: str, make: Callable[[nn.Module], Caches], trace: bool
) -> None:
    own, exact = in_bfloat16(family), in_bfloat16(family)
    exact.set_dtype(mx.float32)
    expected = decoded(exact, make)

    model = mlx_marlin.optimize(in_bfloat16(family), compute="float16", trace=trace)
    cache = make(model)
    outputs = decoded(model, lambda _: cache)

    assert {y.dtype for y in outputs} == {cache[0].keys.dtype} == {mx.float16}
    assert error(outputs, expected) < 0.4 * error(decoded(own, make), expected)
    assert error(outputs, expected) < 2**-7


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_restore_gives_back_each_bit(way: dict[str, Any]) -> None:
    model = mlx_marlin.optimize(in_bfloat16(), compute="float16", **way)
    mx.eval(model(mx.array([[1]]), cache=one_stream(model)))
    assert not any(array.dtype == mx.bfloat16 for array in arrays(model).values())

    assert_same_bits(mlx_marlin.restore(model), in_bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_restore_gives_back_each_bit_after_another_layout(layout: str) -> None:
    model = mlx_marlin.optimize(in_bfloat16(), layout="marlin", join=True)
    mlx_marlin.optimize(model, layout=layout, compute="float16")
    mlx_marlin.optimize(model, layout=LAYOUTS[layout == "mlx"])
    mlx_marlin.optimize(copy.deepcopy(model), compute="float16", join=True)

    assert {array.dtype for array in arrays(model).values()} == {mx.float16, mx.uint32}
    assert_same_bits(mlx_marlin.restore(model), in_bfloat16())


class PlantedError(Exception):
    pass


def test_an_error_of_optimize_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_bfloat16()

    def fail(*_: Any) -> None:
        raise PlantedError

    monkeypatch.setattr("mlx_marlin.lm.optimize.run_once", fail)
    with pytest.raises(PlantedError):
        mlx_marlin.optimize(model, compute="float16")

    assert_same_bits(model, in_bfloat16())


@sampled(3, 8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("optimize.give_back_bfloat16", 1),
        ("optimize.give_back_bfloat16", 2),
        ("optimize.drop_float16_record", 1),
        ("float16._to_bfloat16", 4),
    ],
)
def test_an_error_of_restore_changes_nothing(
    name: str, nth: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a layer was quantized in float16; it then has the dtype of the model."""
    model, path = in_bfloat16(), "layers.0.self_attn.q_proj"
    attention = model.layers[0].self_attn
    attention.q_proj = nn.Linear(128, 128, bias=False)
    attention.q_proj.set_dtype(mx.bfloat16)
    mlx_marlin.optimize(model, compute="float16", quantize=True, layout=layout)
    before, calls = bits(model), iter(range(1, 1000))
    own = getattr(float16, name.rpartition(".")[2])

    def late(*given: Any) -> Any:
        result = own(*given)
        if next(calls) == nth:
            raise PlantedError
        return result

    monkeypatch.setattr(f"mlx_marlin.lm.{name}", late)
    with pytest.raises(PlantedError):
        mlx_marlin.restore(model)

    assert_bits(model, before)
    mlx_marlin.restore(model)
    found, own_bits = bits(model), bits(in_bfloat16())
    for name, array in own_bits.items():
        assert path in name or mx.array_equal(found[name], array)
    assert types(model) == types(in_bfloat16())
    assert {array.dtype for array in arrays(model).values()} == {mx.bfloat16, mx.uint32}
    assert vars(model).keys() == vars(in_bfloat16()).keys()


def test_by_default_and_in_other_dtypes_nothing_is_converted() -> None:
    model = mlx_marlin.optimize(in_bfloat16())
    assert_same_bits(mlx_marlin.restore(model), in_bfloat16())
    for dtype in (mx.float16, mx.float32):
        model = mlx_marlin.optimize(tiny("llama", dtype), compute="float16")
        assert decoded(model, one_stream)[0].dtype == dtype
        assert_same_bits(mlx_marlin.restore(model), tiny("llama", dtype))


def test_a_changed_parameter_keeps_its_change() -> None:
    model = mlx_marlin.optimize(in_bfloat16(), compute="float16")
    weight = model.layers[0].input_layernorm.weight
    weight[2] = 0.5

    mlx_marlin.restore(model)

    found = model.layers[0].input_layernorm.weight
    expected = in_bfloat16().layers[0].input_layernorm.weight
    expected[2] = 0.5
    assert mx.array_equal(found.view(mx.uint16), expected.view(mx.uint16))


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_adapters_are_trained_and_the_layers_in_them_restored(
    way: dict[str, Any],
) -> None:
    model = mlx_marlin.optimize(in_bfloat16(), compute="float16", **way)
    model.freeze()
    config = {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 2, config)
    loss = nn.value_and_grad(model, lambda t: model(t).astype(mx.float32).sum())
    _, gradients = loss(mx.array([[1, 2, 3]]))
    assert "lora_b" in gradients["model"]["layers"][1]["self_attn"]["q_proj"]

    mlx_marlin.restore(model)

    own = in_bfloat16().layers[1].self_attn.q_proj.scales
    found = model.layers[1].self_attn.q_proj.linear.scales
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, own)


def test_a_quantized_cache_holds_scales_in_float16() -> None:
    model = mlx_marlin.optimize(in_bfloat16(), compute="float16", trace=True)
    cache = quantized(model)

    outputs = decoded(model, lambda _: cache)

    _, scales, biases = cache[0].keys
    assert {y.dtype for y in (*outputs, scales, biases)} == {mx.float16}


def test_a_cache_filled_before_is_used_with_the_models_error() -> None:
    model, cache = in_bfloat16(), [caches.KVCache() for _ in range(2)]
    tokens = mx.array([[5, 6, 7, 8, 9]])
    expected = model(tokens)[:, -1]
    model(tokens[:, :4], cache=cache)

    mlx_marlin.optimize(model, compute="float16")
    logits = model(tokens[:, 4:], cache=cache)[:, -1]

    # MLX computes float16 queries and bfloat16 keys in float32.
    assert logits.dtype == mx.float32
    assert error([logits], [expected]) < 0.03


def overflowing() -> nn.Module:
    model = in_bfloat16()
    for layer in model.layers:
        layer.post_attention_layernorm.weight *= 3e4
    return model


def overflowing_with_wide_logits() -> nn.Module:
    model = overflowing()
    model.model.norm.weight = model.model.norm.weight.astype(mx.float32)
    return model


def with_element(path: str, value: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = in_bfloat16()
        array = arrays(model)[path]
        array[:] = value
        model.load_weights([(path, array)], strict=False)
        return model

    return make


def with_byte_scales() -> nn.Module:
    model = in_bfloat16(tie_word_embeddings=True)
    model.model.embed_tokens = nn.QuantizedEmbedding(100, 128, 32, 4, "mxfp4")
    return model


def with_a_constant() -> nn.Module:
    model = in_bfloat16()
    own = type(model.model.norm)

    class Norm(own):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * mx.array([2], mx.bfloat16)

    model.model.norm.__class__ = Norm
    return model


SCALES, NORM = "model.layers.0.mlp.up_proj.scales", "model.norm.weight"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (with_element(NORM, 7e4), f"{NORM} has an element of .*, above 65504"),
        (with_element(SCALES, 2e-5), f"{SCALES} is too small"),
        (with_byte_scales, "scales are bytes"),
        (overflowing, "activations of a short prompt exceed 65504"),
        (overflowing_with_wide_logits, "activations of a short prompt exceed 65504"),
        (with_a_constant, "has bfloat16 numbers that are no parameters"),
        (lambda: tiny("gemma3_text", mx.bfloat16), "gemma3_text scales its emb"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_unchanged(
    make: Callable[[], nn.Module], said: str
) -> None:
    model = make()
    before, keys = bits(model), {*vars(model)}

    with pytest.raises(ValueError, match=f"compute='float16': .*{said}"):
        mlx_marlin.optimize(model, compute="float16")

    assert_bits(model, before)
    assert {*vars(model)} == keys


@pytest.mark.parametrize("values", [[1e-25] * 4, [1e-6, float("inf")]], ids=str)
def test_elements_that_would_vanish_are_refused(values: list[float]) -> None:
    model = Layers(nn.QuantizedLinear(64, 64))
    model.extra = mx.array(values, mx.bfloat16)

    with pytest.raises(ValueError, match="extra is too small"):
        mlx_marlin.optimize(model, compute="float16")


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,)], ids=str)
def test_any_module_is_converted_with_empty_arrays_and_zeros(
    shape: tuple[int, ...],
) -> None:
    model = Layers(nn.QuantizedLinear(64, 64), nn.RMSNorm(64))
    model.set_dtype(mx.bfloat16)
    model.extra = mx.zeros(shape, mx.bfloat16)
    x = mx.ones((1, 64), mx.float16)

    mlx_marlin.optimize(model, compute="float16")

    assert model.extra.dtype == model(x).dtype == mx.float16
    mlx_marlin.restore(model)
    assert model.extra.dtype == model(x.astype(mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_layers_are_checked_as_their_parts(layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "compute": "float16", "dry_run": True}
    plain = mlx_marlin.optimize(in_bfloat16(), layout=layout)
    told = mlx_marlin.optimize(plain, **options).float16
    joined = mlx_marlin.optimize(in_bfloat16(), layout=layout, join=True)
    assert mlx_marlin.optimize(joined, **options).float16 == told

    model = with_element("model.layers.1.self_attn.k_proj.scales", 1e5)()
    mlx_marlin.optimize(model, layout=layout, join=True)
    said = r"model.layers.1.self_attn.k_proj.\w+ has an element of .*, above 65504"
    with pytest.raises(ValueError, match=said):
        mlx_marlin.optimize(model, layout=layout, join=True, compute="float16")


def test_dry_run_counts_what_would_be_rounded() -> None:
    model = in_bfloat16()

    told = mlx_marlin.optimize(model, compute="float16", dry_run=True)

    assert_same_bits(model, in_bfloat16())
    found = [a for a in arrays(model).values() if a.dtype == mx.bfloat16]
    assert told.float16 is not None
    assert told.float16.arrays == len(found)
    assert told.float16.elements == sum(array.size for array in found)
    # 1e-7 and 3e-6, each in a norm and in the scales of a layer
    changed = [a != a.astype(mx.float16).astype(mx.bfloat16) for a in found]
    assert told.float16.rounded == sum(int(mx.sum(each)) for each in changed) >= 4
    assert str(told).splitlines()[-1].startswith("compute=float16: ")
    assert mlx_marlin.optimize(model, dry_run=True).float16 is None


class Siblings(nn.Module):
    """Has layers named as adapters name the layer that they adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(64, 64), nn.Embedding(64, 64)
        self.q = nn.QuantizedLinear(64, 64)
        self.set_dtype(mx.bfloat16)
        self.linear.weight[:] = mx.array(SMALL[2], mx.bfloat16)
        self.linear.weight[0] = 1
        mx.eval(self.parameters())


def test_layers_with_names_of_adapters_are_given_back() -> None:
    model = Siblings()
    before = bits(model)

    mlx_marlin.restore(mlx_marlin.optimize(model, compute="float16"))

    assert {array.dtype for array in arrays(model).values()} == {mx.bfloat16, mx.uint32}
    assert_bits(model, before)


def test_the_error_of_an_element_is_the_documented_one() -> None:
    every = mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16).view(mx.bfloat16)
    held = mx.where(mx.abs(every.astype(mx.float32)) <= 65504, every, 0)
    model = Layers(nn.QuantizedLinear(64, 64))
    model.layers[0].bias = held
    small = mx.abs(held.astype(mx.float32)) < 2.0**-17

    float16.use_float16(model, Changes())

    half = model.layers[0].bias
    off = mx.abs(half.astype(mx.float32) - held.astype(mx.float32))
    assert mx.max(off) == 2.0**-25
    assert mx.max(mx.where(small, 0, off)) == 0
    float16.give_back_bfloat16(model, Changes())
    assert mx.array_equal(model.layers[0].bias.view(mx.uint16), held.view(mx.uint16))
