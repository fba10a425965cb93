"""Heads that a product rotates as it stores them: kernels on the CPU, and layers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.backends import graph
from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import (
    EPSILON,
    GATED_WAYS,
    HEAD_EPSILON,
    NORMED_HEADS,
    NORMED_WAYS,
    ROTATED_N,
    ROTATION,
    Case,
    normalized,
)
from support.cuda_products import Product
from support.oracles import exact
from support.profiles import sampled
from support.rotated_layers import (
    EACH,
    OF_128,
    PARTS,
    arrays_of,
    layer_of,
    norm_module,
    rows_of,
)

Heads = tuple[Rotation, int, tuple[int, ...]]

HEADS: tuple[Heads, ...] = (
    (ROTATION, 256, PARTS),
    (EACH, 256, ()),
    (Rotation(128, 256, per_row=True), 384, (128, 128, 128)),
    (Rotation(256, 256), 512, ()),
    (Rotation(64, 0), 128, ()),
    (Rotation(64, 128), 128, (64, 64)),
    (Rotation(192, 384, per_row=True), 576, (192, 192, 192)),
    (Rotation(64, 64, factor=1.25), 128, (64, 64)),
)
"""Rotations, columns and parts: heads of several sizes, none, and all rotated."""

NORMED: tuple[tuple[Heads, int, dict[str, int]], ...] = (
    ((NORMED_HEADS, 256, PARTS), 0, {}),
    ((replace(NORMED_HEADS, per_row=False), 256, ()), 4, {}),
    ((replace(OF_128, per_row=True), 384, (128, 256)), 0, {"simdgroups_n": 4}),
    ((replace(OF_128, columns=384), 640, ()), 3, {"simdgroups_n": 8}),
    ((OF_128, 256, (128, 128)), 4, {"simdgroups_n": 4}),
    (
        (Rotation(192, 576, norm=0.5, queries=384), 768, (384, 384)),
        2,
        {"simdgroups_n": 6},
    ),
    ((Rotation(256, 256, norm=0.0, factor=0.75), 512, ()), 1, {"simdgroups_n": 8}),
)
"""Of heads with norms: kernels, and tiles that have one head or several."""

FORMATS = (
    ("affine", 3, 32, "marlin", "bfloat16"),
    ("nvfp4", 4, 16, "marlin", "float16"),
    ("affine", 8, 64, "mlx", "bfloat16"),
)

PACKED = ("affine", 4, 64, "marlin", "float16")


def rotated(
    heads: Heads, way: int, bias: bool, overrides: dict[str, int] | None = None
) -> Product:
    (rotation, n, parts), (m, own) = heads, GATED_WAYS[way]
    epilogue = Epilogue(bias=bias, rotation=rotation, parts=parts)
    return Product((*PACKED, m, own | (overrides or {})), epilogue, n)


def products() -> Iterator[tuple[str, Product]]:
    """Yields products whose heads are rotated, by their kind."""
    # Twice, with each kernel in turn, and with a bias or without.
    for each in zip(2 * HEADS, cycle((1, 3, 4)), cycle((False, True)), strict=False):
        yield "heads of any size", rotated(*each)
    for heads, way, overrides in NORMED:
        yield "heads with norms", rotated(heads, way, bool(way % 2), overrides)
    for format in FORMATS:
        case: Case = (*format, *GATED_WAYS[0])
        yield "formats", Product(case, Epilogue(rotation=ROTATION), ROTATED_N)
    m, way = NORMED_WAYS[1]
    for bias in (False, True):
        case = (*PACKED, m, way | {"simdgroups_n": 6})
        epilogue = Epilogue(bias=bias, rotation=EACH, parts=PARTS)
        yield "normalized rows", Product(case, epilogue, ROTATED_N, norm=EPSILON)


@sampled(4, 12)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("kind", "product"), [*products()], ids=str)
def test_heads_are_rotated(kind: str, product: Product) -> None:
    cuda_on_cpu.check_product(product)


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("call", "dtype"), [*zip(GATED_WAYS, cycle(limits.DTYPES), strict=False)], ids=str
)
def test_integers_are_exact_at_the_first_place(
    call: tuple[int, dict[str, Any]], dtype: str
) -> None:
    m, way = call
    weight, x, expected = cuda_cases.integers(dtype, m, way, ROTATED_N)
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    epilogue = Epilogue(rotation=ROTATION, parts=PARTS)
    plan = cuda_on_cpu.plan_of(case, epilogue=epilogue, n=ROTATED_N)
    place, freqs = mx.zeros(1, mx.int32), cuda_cases.freqs_of(ROTATION)

    parts = cuda_on_cpu.run(plan, x, weight, x, x, x, place, freqs)

    assert [y.shape for y in parts] == [(m, n // 64, 1, 64) for n in PARTS]
    y = np.concatenate([exact(y).reshape(m, -1) for y in parts], axis=-1)
    assert np.array_equal(y, expected)


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("streams", [1, 3, 12])
@pytest.mark.parametrize("rotation", [ROTATION, EACH, NORMED_HEADS])
@pytest.mark.parametrize("parts", [(), PARTS], ids=str)
def test_a_layer_rotates_its_heads(
    streams: int, rotation: Rotation, parts: tuple[int, ...]
) -> None:
    bias = rotation.per_row == (streams == 3)
    layer, norm, x = layer_of(bias=bias), norm_module(), rows_of(streams)
    given = *arrays_of(streams, rotation), cuda_cases.norms_of(rotation, mx.float16)

    y = layer.rotated(x, norm, rotation, parts, *given)

    results = [*y] if parts else [y]
    assert [part.shape[1] for part in results] == ([2, 1, 1] if parts else [4])
    y = mx.concatenate(results, axis=1)
    native = layer_of(layout="mlx", bias=bias).native()
    normed = normalized(x.reshape(streams, -1), norm.weight, norm.eps)
    total = oracles.product(mx.array(normed), *native, group_size=64)
    total = total + exact(layer["bias"]) if bias else total
    positions, freqs, norms = given
    expected = epilogues.rotated(total, rotation, positions, freqs, *norms)
    assert y.dtype == mx.float16
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    built = [plan.problem for plan in graph.plans_built()]
    assert built[-1].epilogue.rotation == rotation
    assert (built[-1].norm is not None) == (streams <= 8)


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rotation", [EACH, NORMED_HEADS])
@pytest.mark.parametrize("parts", [(), PARTS], ids=str)
def test_gradients_are_those_of_mlxs_operations(
    parts: tuple[int, ...], rotation: Rotation
) -> None:
    layer, norm, x = layer_of(bias=True), norm_module(), rows_of(2)
    positions, freqs = arrays_of(2, rotation)
    norms = cuda_cases.norms_of(rotation, mx.float16)

    def loss(heads: Any) -> mx.array:
        whole = mx.concatenate([*heads], axis=1) if parts else heads
        weights = mx.arange(whole.size).reshape(whole.shape) / whole.size
        total: mx.array = (whole * weights).sum()
        return total

    def inside(x: mx.array, bias: mx.array, *norms: mx.array) -> mx.array:
        layer["bias"] = bias
        return loss(layer.rotated(x, norm, rotation, parts, positions, freqs, norms))

    def apart(x: mx.array, bias: mx.array, *norms: mx.array) -> mx.array:
        own = layer_of(layout="mlx", bias=True)
        own.set_dtype(x.dtype)
        native = own["weight"], own["scales"], own["biases"]
        y = mx.quantized_matmul(norm(x), *native, group_size=64) + bias
        y = y.reshape(2, 4, 1, 64)
        heads = [y[:, :2], y[:, 2:3]]
        if norms:
            pairs = zip(heads, norms, strict=True)
            heads = [
                mx.fast.rms_norm(each, weight, HEAD_EPSILON) for each, weight in pairs
            ]
        turned = mx.fast.rope(
            mx.concatenate(heads, axis=1),
            64,
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=freqs,
        )
        y = mx.concatenate([turned, y[:, 3:]], axis=1)
        return loss(mx.split(y, [2, 3], axis=1) if parts else y)

    given = x, layer["bias"], *norms
    ours = mx.grad(inside, argnums=[*range(len(given))])(*given)
    assert graph.plans_built()[-1].problem.epilogue.rotation == rotation
    expected = mx.grad(apart, argnums=[*range(len(given))])(*given)
    wide = mx.grad(apart, argnums=[*range(len(given))])(
        *(each.astype(mx.float32) for each in given)
    )
    for each, own, truth in zip(ours, expected, wide, strict=True):
        # Both round what lies between, after each operation and not the same ones.
        assert truth.dtype == mx.float32
        most = max(2 * oracles.error(own, exact(truth)), 1e-3)
        assert oracles.error(each, exact(truth)) < most


@pytest.mark.parametrize(
    "how",
    [
        *("stock", "emulator", "invariant", "mlx", "wide bias", "wide norms"),
        *("small heads", "large heads", "a vector"),
    ],
)
def test_where_kernels_have_no_rotation_there_is_none(
    how: str, request: pytest.FixtureRequest
) -> None:
    served = {"stock": "stock", "emulator": "kernels"}.get(how, "on_cpu")
    request.getfixturevalue(served)
    n = 512 if how == "large heads" else ROTATED_N
    layer = layer_of("mlx" if how == "mlx" else "marlin", n=n, bias=True)
    layer.invariant = how == "invariant"
    if how == "wide bias":
        layer["bias"] = layer["bias"].astype(mx.float32)
    rotation = {
        "wide norms": NORMED_HEADS,
        "small heads": Rotation(32, 64),
        "large heads": Rotation(512, 512, norm=EPSILON),
    }.get(how, ROTATION)
    x = rows_of(1)[0, 0] if how == "a vector" else rows_of(2)
    dtype = mx.float32 if how == "wide norms" else mx.float16
    arrays = *arrays_of(2, rotation), cuda_cases.norms_of(rotation, dtype)

    assert layer.rotated(x, norm_module(), rotation, (), *arrays) is None
    assert not any(plan.problem.epilogue.rotation for plan in graph.plans_built())
