"""Which ropes and which arrays a product's rotation takes."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import rope_utils

from mlx_marlin.lm.tracing.attention import freqs_of
from mlx_marlin.planning.epilogue import Rotation
from support import epilogues, oracles
from support.cuda_cases import NORMED_HEADS, ROTATION
from support.oracles import exact
from support.rotated_layers import EACH, arrays_of, layer_of, norm_module, rows_of


@pytest.mark.parametrize(
    ("rotation", "positions", "freqs", "words"),
    [
        (EACH, mx.zeros(1, mx.int32), mx.ones(32), r"\(1,\), expected int32 \[2\]"),
        (EACH, mx.zeros(2, mx.int64), mx.ones(32), "positions are mlx.core.int64"),
        (EACH, mx.zeros((), mx.int32), mx.ones(32), "expected int32"),
        (EACH, mx.zeros(2, mx.int32), mx.ones(64), r"\(64,\), expected float32 \[32\]"),
        (
            EACH,
            mx.zeros(2, mx.int32),
            mx.ones(32, mx.float16),
            "freqs are mlx.core.float16",
        ),
        # Of one place for all rows there is a number.
        (ROTATION, mx.zeros((), mx.int32), mx.ones(32), r"int32 \[1 or more\]"),
        (ROTATION, mx.zeros(0, mx.int32), mx.ones(32), r"int32 \[1 or more\]"),
    ],
)
def test_arrays_that_are_no_rotations_are_refused(
    rotation: Rotation, positions: mx.array, freqs: mx.array, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layer_of().rotated(rows_of(2), norm_module(), rotation, (), positions, freqs)


@pytest.mark.parametrize(
    ("rotation", "norms", "words"),
    [
        (EACH, (mx.ones(64), mx.ones(64)), r"expected \[\] with norm=None"),
        (NORMED_HEADS, (), r"\[\], expected \[\(64,\), \(64,\)\] with norm=4.0"),
        (NORMED_HEADS, (mx.ones(64), mx.ones(32)), r"\(32,\)\], expected"),
    ],
)
def test_norms_that_are_not_the_rotations_are_refused(
    rotation: Rotation, norms: tuple[mx.array, ...], words: str
) -> None:
    given = *arrays_of(2, rotation), norms
    with pytest.raises(ValueError, match=words):
        layer_of().rotated(rows_of(2), norm_module(), rotation, (), *given)


LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}


def with_rounded_periods(rope: nn.Module) -> nn.Module:
    rope._freqs = rope._freqs.astype(mx.float16)
    return rope


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(64),
        nn.RoPE(64, base=5e5, scale=0.25),
        rope_utils.Llama3RoPE(64, base=5e5, scaling_config=LLAMA3),
        rope_utils.YarnRoPE(64, scaling_factor=32.0),
    ],
    ids=lambda rope: f"{type(rope).__name__} {vars(rope).get('scale', '')}",
)
def test_periods_are_a_ropes(rope: nn.Module) -> None:
    rotation = Rotation(64, 64, per_row=True, factor=getattr(rope, "mscale", 1))
    positions = mx.array([0, 1, 100, 30000], mx.int32)
    heads = mx.random.normal((4, 1, 1, 64), key=mx.random.key(2))
    freqs = freqs_of(rope, 64)
    assert freqs is not None

    turned = epilogues.rotated(exact(heads)[:, 0, 0], rotation, positions, freqs)

    # Periods are rounded, and with them angles, the more the further the place.
    assert oracles.error(rope(heads, offset=positions), turned) < 1e-3
    assert oracles.error(rope(heads, offset=positions)[:3], turned[:3]) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(64, traditional=True),
        nn.RoPE(32),
        rope_utils.SuScaledRoPE(64, long_factor=2.0),
        rope_utils.YarnRoPE(64, traditional=True),
        rope_utils.YarnRoPE(64, scaling_factor=32.0, mscale=-10),
        rope_utils.Llama3RoPE(64, traditional=True, scaling_config=LLAMA3),
        with_rounded_periods(rope_utils.Llama3RoPE(64, scaling_config=LLAMA3)),
    ],
    ids=lambda rope: type(rope).__name__,
)
def test_other_ropes_have_none(rope: nn.Module) -> None:
    assert freqs_of(rope, 64) is None
