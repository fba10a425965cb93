"""The products of a model that `tune` measures."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.measure import layers
from mlx_marlin.weights.formats import LAYOUTS
from support.models import Layers, tiny_llama
from support.timed_products import LARGE, SMALL


def test_a_models_products_are_found_once_each() -> None:
    found = layers.find(tiny_llama(tied=False))

    sizes = {(each.n, each.k) for each in found.problems}
    # Queries and output, keys and values, gate and up, down, head.
    assert sizes == {(64, 64), (32, 64), (160, 64), (64, 160), (100, 64)}
    assert len(found.problems) == 5
    assert found.others == 0
    assert {each.group_size for each in found.problems} == {32}
    assert {each.dtype for each in found.problems} == {"float32"}


def test_a_tied_head_multiplies_by_the_table_as_it_lies() -> None:
    untied = layers.find(tiny_llama(tied=False), ["marlin"])
    tied = layers.find(tiny_llama(tied=True), ["marlin"])

    def layouts(found: layers.Found) -> dict[int, str]:
        return {each.n: each.layout for each in found.problems}

    assert layouts(untied)[100] == "marlin"
    assert layouts(tied)[100] == "mlx"
    assert layouts(tied)[160] == "marlin"


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

    found = layers.find(model)

    assert found.others == 1
    assert {(each.mode, each.bits, each.group_size) for each in found.problems} == {
        ("affine", 4, 64),
        ("affine", 3, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    }
    assert {each.scale_dtype for each in found.problems} == {"float32", "uint8"}
    assert {each.dtype for each in found.problems} == {"float32"}


def test_without_any_float_bytes_meet_what_mlx_decodes_them_to() -> None:
    model = Layers(linear(mode="mxfp4"))
    found = layers.find(model, LAYOUTS)

    assert {(each.dtype, each.layout) for each in found.problems} == {
        ("bfloat16", "mlx"),
        ("bfloat16", "marlin"),
    }
    model.norm = nn.RMSNorm(8)
    model.norm.weight = model.norm.weight.astype(mx.float16)
    assert {each.dtype for each in layers.find(model).problems} == {"float16"}


def test_rows_multiply_problems_and_none_comes_twice() -> None:
    several = layers.with_rows([SMALL, LARGE, replace(SMALL, m=9)], (1, 8, 1))

    assert several == [replace(each, m=m) for each in (SMALL, LARGE) for m in (1, 8)]
