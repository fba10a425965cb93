"""The products of a model that `tune` measures."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.race.model_products import single_products
from mlx_marlin.weights.formats import LAYOUTS
from support.models import Layers, tiny_llama


def test_a_models_products_are_found_once_each() -> None:
    found, others = single_products(tiny_llama(tied=False), ["mlx"])

    sizes = {(each.n, each.k) for each in found}
    # Queries and output, keys and values, gate and up, down, head.
    assert sizes == {(64, 64), (32, 64), (160, 64), (64, 160), (100, 64)}
    assert len(found) == 5
    assert others == 0
    assert {each.group_size for each in found} == {32}
    assert {each.dtype for each in found} == {"float32"}


def test_a_tied_head_multiplies_by_the_table_as_it_lies() -> None:
    def layouts(tied: bool) -> dict[int, str]:
        found, _ = single_products(tiny_llama(tied=tied), ["marlin"])
        return {each.n: each.layout for each in found}

    assert layouts(tied=False)[100] == "marlin"
    assert layouts(tied=True)[100] == "mlx"
    assert layouts(tied=True)[160] == "marlin"


def linear(k: int = 128, **format: Any) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(k, 96, bias=False, **format)


def test_layers_keep_their_formats_and_those_that_are_not_ours_are_counted() -> None:
    model = Layers(
        linear(bits=4),
        linear(bits=3, group_size=32),
        linear(mode="mxfp4"),
        linear(mode="mxfp8"),
        linear(mode="nvfp4"),
        linear(96, mode="nvfp4"),  # k is no multiple of 64
        nn.Linear(8, 8),
    )

    found, others = single_products(model, ["mlx"])

    assert others == 1
    assert {(each.mode, each.bits, each.group_size) for each in found} == {
        ("affine", 4, 64),
        ("affine", 3, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    }
    assert {each.scale_dtype for each in found} == {"float32", "uint8"}
    assert {each.dtype for each in found} == {"float32"}


def test_without_any_float_bytes_meet_what_mlx_decodes_them_to() -> None:
    model = Layers(linear(mode="mxfp4"))
    found, _ = single_products(model, LAYOUTS)

    assert {(each.dtype, each.layout) for each in found} == {
        ("bfloat16", "mlx"),
        ("bfloat16", "marlin"),
    }
    model.norm = nn.RMSNorm(8)
    model.norm.weight = model.norm.weight.astype(mx.float16)
    found, _ = single_products(model, ["mlx"])
    assert {each.dtype for each in found} == {"float16"}
