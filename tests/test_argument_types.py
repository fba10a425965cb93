"""Arguments of the wrong type are named, and what is returned is shown in a line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin import MarlinLinear, PackedWeight, pack
from support.arguments import BIASES, PACKED, SCALES, K, N, W, X, packed_unread, weight
from support.choose import Choose
from support.models import tiny_llama

EXPERTS = weight(batch=3)
PACKED_EXPERTS = packed_unread(*EXPERTS)
ROWS = mx.zeros((2, 1, K))
CHOSEN = mx.array([0, 2], mx.uint32)
FLOATS = mx.zeros((N, K))
LIST = [1.0]

gather, linear, linears = mlx_marlin.gather_qmm, mlx_marlin.linear, mlx_marlin.linears
quantize = partial(mlx_marlin.quantize, FLOATS)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: mlx_marlin.optimize((nn.Sequential(), "tokenizer")), "model.*tuple.*load"),
    (lambda: mlx_marlin.optimize(3), r"model must be an nn\.Module, got int$"),
    (lambda: mlx_marlin.restore((nn.Sequential(), 1)), "model .*got tuple.*load"),
    (lambda: mlx_marlin.quantize(FLOATS.tolist()), r"w must be an mx\.array.*list"),
    (lambda: quantize(bits="4"), "bits='4' .*int or None.*str"),
    (lambda: quantize(bits=True), "bits=True must be an int"),
    (lambda: quantize(bits=4.0), r"bits=4\.0 must be an int"),
    (
        lambda: quantize(group_size="row"),
        "group_size='row' must be an int, 'channel' or None",
    ),
    (lambda: quantize(mode=None), "mode=None must be a str"),
    (
        lambda: quantize(mode="nvfp4", global_scale=1.0),
        r"global_scale=1\.0 must be an mx\.array or None, got float",
    ),
    (lambda: pack(np.array(W), SCALES, BIASES), r"w must be an mx\.array.*ndarray"),
    (lambda: pack(W, SCALES, LIST), r"biases must be an mx\.array or None, got list"),
    (lambda: pack(W, SCALES, BIASES, bits="4"), "bits='4' must be an int"),
    (lambda: mlx_marlin.unpack(W), "packed must be a PackedWeight, got array"),
    (
        lambda: PackedWeight(words=LIST, scales=PACKED.scales, n=N, k=K),
        r"words must be an mx\.array, got list",
    ),
    (
        lambda: PackedWeight(words=PACKED.words, scales=PACKED.scales, n="40", k=K),
        "n='40' must be an int, got str",
    ),
    (lambda: linear(X.tolist(), PACKED), r"x, w.*must be mx\.array.*got list"),
    (lambda: linear(X, W, SCALES, BIASES, bits="4"), "bits='4' must be an int"),
    (lambda: linear(X, W, SCALES.tolist(), BIASES), r"must be mx\.array.*list"),
    (lambda: linear(X, PACKED, bias=[0.0] * N), "bias must be .*got list"),
    (lambda: linear(X, PACKED, multiply=LIST), "multiply must be .*got list"),
    (lambda: linear(X, PACKED, residual=1.0), r"residual=1\.0 must be .*got float"),
    (lambda: linear(X, PACKED, activation=LIST), "activation must be a str or None"),
    (lambda: linears(X, W.tolist(), SCALES, parts=(20, 20)), "must be mx.*got.*list"),
    (lambda: linears(X, PACKED, parts=3), "parts=3 must be a sequence of 2 to 6 ints"),
    (lambda: linears(X, PACKED, parts=(20.5, 19.5)), r"parts=\(20\.5.*must be ints"),
    (lambda: linears(X, PACKED, parts=(20, 20), bias=LIST), "bias must be .*list"),
    (
        lambda: mlx_marlin.quantized_matmul(X, W, SCALES, BIASES, group_size="64"),
        "group_size='64' must be an int or None, got str",
    ),
    (lambda: gather(ROWS.tolist(), PACKED_EXPERTS), "x must be .*got list"),
    (
        lambda: gather(ROWS, PACKED_EXPERTS, rhs_indices=np.array([0, 2])),
        r"rhs_indices must be an mx\.array or None, got ndarray",
    ),
    (
        lambda: gather(ROWS, PACKED_EXPERTS, lhs_indices=[0], rhs_indices=CHOSEN),
        "lhs_indices must be .*got list",
    ),
    (lambda: gather(ROWS, *EXPERTS, rhs_indices=[0, 2]), "^rhs_indices .*got list"),
    (
        lambda: gather(ROWS, EXPERTS[0].tolist(), *EXPERTS[1:], rhs_indices=CHOSEN),
        "^w must be .*got list",
    ),
    (
        lambda: gather(ROWS, *EXPERTS, rhs_indices=CHOSEN, bits="4"),
        "^bits='4' must be an int or None",
    ),
    (lambda: MarlinLinear("128", N), "input_dims='128' must be an int, got str"),
    (lambda: MarlinLinear(K, 4.0), r"output_dims=4\.0 must be an int, got float"),
    (lambda: MarlinLinear(K, N, bits="4"), "bits='4' must be an int or None"),
    (lambda: MarlinLinear(K, N, mode=None), "mode=None must be a str"),
    (
        lambda: MarlinLinear.from_quantized(nn.Linear(K, N)),
        r"layer must be an nn\.QuantizedLinear, got Linear",
    ),
    (
        lambda: MarlinLinear.from_linear(nn.QuantizedLinear(K, N)),
        r"linear_layer must be an nn\.Linear, got QuantizedLinear",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[each for _, each in WRONG])
@pytest.mark.usefixtures("served_by")
def test_an_argument_of_the_wrong_type_is_named(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
def test_a_packed_layers_native_arrays_cannot_be_set(name: str) -> None:
    layer = MarlinLinear(K, N, layout="marlin")
    before = dict(layer)

    with pytest.raises(TypeError, match=rf"{name} of a layer.*'marlin'.*from_quant"):
        setattr(layer, name, getattr(layer, name))

    assert dict(layer) == before
    native = MarlinLinear(K, N)
    setattr(native, name, getattr(native, name) + 1)


def test_integers_of_numpy_are_integers() -> None:
    packed = quantize(bits=np.int64(4), group_size=np.int64(32))
    # Or a cache that was filled by this call would return NumPy's to the next.
    assert {type(packed.bits), type(packed.group_size)} == {int}

    assert packed.group_size == 32


@pytest.mark.parametrize("w", [W[0], W[0, 0]])
def test_parts_of_a_weight_that_is_no_matrix_are_refused(w: mx.array) -> None:
    with pytest.raises(ValueError, match=r"w has shape .*expected \[n, k"):
        mlx_marlin.linears(X, w, SCALES, BIASES, parts=(20, 20))


def test_what_is_returned_is_shown_in_a_line(backend: Choose) -> None:
    backend("emulator")
    model = tiny_llama()
    choice = mlx_marlin.plan(8, 4096, 4096, chip="M3 Max")
    packed = mlx_marlin.quantize(mx.ones((64, 128)))
    shown = {
        repr(choice): choice.explain(),
        repr(mlx_marlin.report(model)): "0 of 15 quantized products are converted",
        repr(mlx_marlin.optimize(model, dry_run=True)): "converts 15 of 15 layers",
        repr(mlx_marlin.optimize(model, dry_run=True).recipe): "measure=True",
        repr(mlx_marlin.verify(model, rows=(1,))): "15 of 15 layers passed",
        repr(packed): "PackedWeight(n=64, k=128, group_size=64, bits=4",
        repr(mlx_marlin.MarlinLinear.from_packed(packed)): "input_dims=128",
        repr(next(mlx_marlin.variants())): "Variant(",
    }
    for text, part in shown.items():
        assert part in text
        assert "\n" not in text
        assert len(text) < 350, text
