"""Written weights are those that were read, or the error that is reported."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.checkpoints import targets
from mlx_marlin.checkpoints.formats.column_order import order_of_columns
from mlx_marlin.checkpoints.formats.integers import integer_weight
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.checkpoints.targets import Written, mlx_target, packed_target
from support import foreign_checkpoints as foreign


def stored(weight: foreign.IntegerWeight) -> StoredWeight:
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
    written = mlx_target(stored(weight))
    assert written.error == 0
    assert written.record == {"group_size": 64, "bits": bits, "mode": "affine"}
    np.testing.assert_array_equal(decoded(written, bits), weight.values)


@pytest.mark.parametrize("rows", [1, 7, 96])
def test_a_rounded_bias_is_reported(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "DECODED_BYTES", rows * 256 * 4)
    weight = foreign.drawn_weight(np.random.default_rng(0), 96, 256, 64, 4)
    weight.zeros[:] = 11  # not a power of two: the product needs more digits
    written = mlx_target(stored(weight))
    difference = decoded(written, 4) - weight.values
    expected = np.linalg.norm(difference) / np.linalg.norm(weight.values)
    assert 0 < expected < 1e-3
    assert written.error == pytest.approx(expected, rel=1e-3)


def test_what_mlx_cannot_say_is_refused() -> None:
    rng = np.random.default_rng(0)
    of_256 = stored(foreign.drawn_weight(rng, 32, 256, 256, 4))
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
