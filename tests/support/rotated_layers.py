"""Rotations, and layers whose product rotates heads."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import Rotation
from support import cuda_cases, gate_and_up
from support.cuda_cases import EPSILON, HEAD_EPSILON, ROTATED_N, ROTATION, norm_of

EACH = replace(ROTATION, per_row=True)

PARTS = (128, 64, 64)

OF_128 = Rotation(128, 256, norm=HEAD_EPSILON, queries=128)


def arrays_of(m: int, rotation: Rotation) -> tuple[mx.array, mx.array]:
    return cuda_cases.positions_of(m, rotation), cuda_cases.freqs_of(rotation)


def rows_of(streams: int) -> mx.array:
    drawn = mx.random.normal((streams, 1, 128), key=mx.random.key(1))
    return drawn.astype(mx.float16)


def norm_module(cls: type[nn.RMSNorm] = nn.RMSNorm) -> nn.RMSNorm:
    norm = cls(128, eps=EPSILON)
    norm.weight = norm_of(mx.zeros((1, 128), mx.float16))
    return norm


def layer_of(
    layout: str = "marlin", *, n: int = ROTATED_N, bias: bool = False
) -> MarlinLinear:
    return gate_and_up.layer_of(layout, n, bias=bias)
