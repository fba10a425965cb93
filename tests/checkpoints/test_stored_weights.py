"""Stored weights are checked, and written as they were or with their error."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.checkpoints import stored_weight
from mlx_marlin.checkpoints.formats import marlin_folder
from mlx_marlin.checkpoints.formats.integers import integer_weight, order_of_columns
from mlx_marlin.checkpoints.stored_weight import (
    TILES,
    StoredWeight,
    Written,
    mlx_target,
    packed_target,
)
from mlx_marlin.weights.formats import FORMATS, format_of
from support import foreign_checkpoints as foreign
from support import format_cases

N, K = 4, 512
INFINITE_HALF = 0x7C00


def stored(mode: str, bits: int) -> StoredWeight:
    size = FORMATS[mode, bits].group_sizes_in("marlin")[-1]
    weight = format_cases.any_weight(mode, bits, size, N, K, dtype="float32", seed=0)
    codes, scales, *biases = weight.native
    return StoredWeight(
        codes=codes,
        scales=scales,
        biases=biases[0] if biases else None,
        **weight.options,
    )


def no_numbers(weight: StoredWeight) -> Iterator[StoredWeight]:
    """Yields the weight with one stored number that is none: the last one of each."""
    if weight.mode in format_cases.SUPER_BLOCKS:  # d, and dmin if there is one
        for place in range(-format_of(weight.mode, weight.bits).parameters, 0):
            yield replace(weight, scales=_changed(weight.scales, INFINITE_HALF, place))
    elif weight.scales.dtype == mx.uint8:
        for octet in (0xFF, 0x7F) if weight.mode == "nvfp4" else (0xFF,):
            yield replace(weight, scales=_changed(weight.scales, octet))
    else:
        names = ("scales", "biases") if weight.biases is not None else ("scales",)
        for name in names:
            for value in (mx.nan, mx.inf, -mx.inf):
                array = _changed(getattr(weight, name), value)
                yield replace(weight, **{name: array})


def _changed(array: mx.array, value: float, place: int = -1) -> mx.array:
    copy = array + 0
    copy[-1, place] = value
    return copy


@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_numbers_that_are_none_are_refused(mode: str, bits: int) -> None:
    weight = stored(mode, bits)
    assert weight.checked() is weight
    changed = [*no_numbers(weight)]
    assert changed
    for each in changed:
        with pytest.raises(ValueError, match="a scale is NaN"):
            each.checked()


@pytest.mark.parametrize("scales", ["packed_scales", marlin_folder.OLD_SCALES])
@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_packed_layers_of_a_folder_are_checked(
    mode: str, bits: int, scales: str
) -> None:
    record = {"layout": TILES, "mode": mode}
    for weight, is_right in (
        (stored(mode, bits), True),
        (next(no_numbers(stored(mode, bits))), False),
    ):
        packed = weight.packed()
        record |= {name: getattr(packed, name) for name in marlin_folder.SIZES}
        arrays = {"a.words": packed.words, f"a.{scales}": packed.scales}
        folder = SimpleNamespace(arrays=arrays, read=arrays.__getitem__)
        with nullcontext() if is_right else pytest.raises(ValueError, match="is NaN"):
            marlin_folder.read(folder, "a", record)


@pytest.mark.parametrize(
    "bits", [bits for mode, bits in FORMATS if mode == "zero_point"]
)
def test_zero_points_are_codes(bits: int) -> None:
    weight = stored("zero_point", bits)
    middle = mx.full(weight.scales.shape, 2.0 ** (bits - 1))
    symmetric = replace(weight, biases=middle).checked()
    assert (symmetric.mode, symmetric.biases) == ("symmetric", None)
    assert mx.array_equal(symmetric.decoded(), replace(weight, biases=middle).decoded())
    with pytest.raises(ValueError, match=f"a zero point is {2**bits}"):
        replace(weight, biases=_changed(middle, 2**bits)).checked()


@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        *(("nvfp4", mx.array(value)) for value in (mx.nan, mx.inf)),
        *(("nvfp4", mx.ones(2)), ("nvfp4", mx.array(1.0, mx.float16))),
        *((mode, mx.array(1.0)) for mode in ("mxfp4", "affine", "symmetric")),
    ],
)
def test_global_scales_that_no_weight_has(mode: str, scale: mx.array) -> None:
    weight = stored(mode, 4)
    with pytest.raises(ValueError, match=r"global_scale|NaN or infinite"):
        replace(weight, global_scale=scale).checked()


def of_integers(weight: foreign.IntegerWeight) -> StoredWeight:
    return integer_weight(
        mx.array(foreign.bit_stream(weight.codes, weight.bits)).view(mx.uint32),
        mx.array(weight.scales),
        mx.array(weight.zeros),
        bits=weight.bits,
        k=weight.codes.shape[1],
    )


def decoded(written: Written, bits: int) -> np.ndarray:
    """The weight that MLX computes with, in float64."""
    parts = (written.arrays[name] for name in ("scales", "biases"))
    floats = (part.astype(mx.float32) for part in parts)
    weight = mx.dequantize(written.arrays["weight"], *floats, 64, bits)
    return np.array(weight, np.float64)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_weights_are_exact_in_mlx(bits: int) -> None:
    weight = foreign.drawn_weight(
        np.random.default_rng(0), 32, 256, 64, bits, symmetric=True
    )
    written = mlx_target(of_integers(weight))
    assert written.error == 0
    assert written.record == {"group_size": 64, "bits": bits, "mode": "affine"}
    np.testing.assert_array_equal(decoded(written, bits), weight.values)


@pytest.mark.parametrize("rows", [1, 7, 96])
def test_a_rounded_bias_is_reported(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weight, "DECODED_BYTES", rows * 256 * 4)
    weight = foreign.drawn_weight(np.random.default_rng(0), 96, 256, 64, 4)
    weight.zeros[:] = 11  # not a power of two: the product needs more digits
    written = mlx_target(of_integers(weight))
    difference = decoded(written, 4) - weight.values
    expected = np.linalg.norm(difference) / np.linalg.norm(weight.values)
    assert 0 < expected < 1e-3
    assert written.error == pytest.approx(expected, rel=1e-3)


def test_what_mlx_cannot_say_is_refused() -> None:
    rng = np.random.default_rng(0)
    of_256 = of_integers(foreign.drawn_weight(rng, 32, 256, 256, 4))
    with pytest.raises(ValueError, match="no affine weights in groups of 256"):
        mlx_target(of_256)
    ordered = foreign.drawn_weight(rng, 32, 256, 64, 4, act_order=True)
    weight = integer_weight(
        mx.array(foreign.bit_stream(ordered.codes, 4)).view(mx.uint32),
        mx.array(ordered.scales),
        mx.array(ordered.zeros),
        bits=4,
        k=256,
        order=order_of_columns(mx.array(ordered.groups_of_columns), 4, 256),
    )
    with pytest.raises(ValueError, match="act-order"):
        mlx_target(weight)
    assert {*packed_target(weight).arrays} == {"words", "packed_scales", "input_order"}
