"""Copying and pickling packed weights preserves all bits."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import mlx.core as mx
import pytest

from mlx_marlin.products.packing import quantize
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases
from support.format_cases import GROUPED
from support.packed_codes import packed_weights
from support.strategies import Grouped

Copy = Callable[[PackedWeight], PackedWeight]
COPIES: dict[str, Copy] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "pickle, protocol 2": lambda packed: pickle.loads(pickle.dumps(packed, protocol=2)),
}
copies = pytest.mark.parametrize("how", COPIES)
N = 40


def _of_format(grouped: Grouped) -> PackedWeight:
    k = 2 * format_cases.step_of(*grouped)
    return packed_weights(grouped, n=N, k=k, dtype="bfloat16")[0]


def with_global_scale() -> PackedWeight:
    w = mx.random.normal((N, 128), key=mx.random.key(1))
    return quantize(w, mode="nvfp4", global_scale=mx.abs(w).max())


def assert_equal(found: PackedWeight, expected: PackedWeight) -> None:
    assert type(found) is PackedWeight
    for each in fields(PackedWeight):
        ours, theirs = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(theirs, mx.array):
            assert ours.dtype == theirs.dtype
            assert mx.array_equal(
                ours[..., None].view(mx.uint8), theirs[..., None].view(mx.uint8)
            )
        else:
            assert ours == theirs


WEIGHTS: dict[str, Callable[[], PackedWeight]] = {
    "global scale": with_global_scale,
    "batch": lambda: packed_weights(("zero_point", 3, 64), 3, n=N, k=128)[0],
    **{grouped[0]: partial(_of_format, grouped) for grouped in GROUPED},
}
"""A weight of every mode, and what is not part of a format."""


@copies
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_copy_is_equal(how: str, kind: str) -> None:
    packed = WEIGHTS[kind]()

    found = COPIES[how](packed)

    assert found is not packed
    assert_equal(found, packed)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_deep_copy_does_not_see_changes(how: str) -> None:
    packed = with_global_scale()
    found, before = COPIES[how](packed), replace(packed)
    kept = [mx.array(each) for each in (packed.words, packed.scales)]
    assert packed.global_scale is not None

    packed.words[:] = 0
    packed.scales[:] = 0
    packed.global_scale[...] = 0

    assert found.global_scale is not None
    assert found.global_scale.item() != 0
    assert mx.array_equal(found.words, kept[0])
    assert mx.array_equal(found.scales, kept[1])
    assert mx.all(before.words == 0)  # `replace` shares arrays, so this would show


def test_a_shallow_copy_shares_its_arrays() -> None:
    packed = with_global_scale()

    found = copy.copy(packed)

    assert found.words is packed.words
    assert found.scales is packed.scales
    assert found.global_scale is packed.global_scale


def test_equal_weights_in_one_deep_copy_stay_one() -> None:
    packed = with_global_scale()

    first, second = copy.deepcopy([packed, packed])

    assert first is second
