"""mlx-lm's own Metal kernels, unmodified: checked, and run against their operations."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import bitlinear_layers, gated_delta, ssm

import metal_emulator
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = needs_emulator

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Of the largest element: a rounding of the result, and float32 sums in any order."""

DTYPES = pytest.mark.parametrize("dtype", [*TOLERANCE], ids=str)


class Checked:
    """A kernel of the emulator whose calls pass the static check first."""

    def __init__(self, **kernel: Any) -> None:
        self.kernel = kernel
        self.run = metal_emulator.metal_kernel(**kernel)

    def __call__(self, **call: Any) -> list[mx.array]:
        metal_emulator.check(**self.kernel, calls=[call])
        return self.run(**call)


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls what makes a kernel as if there were a GPU."""

    def make(maker: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(mx.metal, "is_available", lambda: True)
            patch.setattr(mx.fast, "metal_kernel", Checked)
            return maker(*arguments)

    return make


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, on_metal: Callable[..., Any]) -> ModuleType:
    """The module `gated_delta` as it is on a Mac."""
    for mask in (False, True):
        for vector in (False, True):
            suffix = ("_vec" if vector else "") + ("_masked" if mask else "")
            kernel = on_metal(gated_delta._make_gated_delta_kernel, mask, vector)
            monkeypatch.setattr(gated_delta, f"_gated_delta_kernel{suffix}", kernel)
    kernel = on_metal(gated_delta._make_gated_delta_packed_kernel)
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", kernel)
    kernel = on_metal(gated_delta._make_gated_delta_kernel_xtree)
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_xtree", kernel)
    return gated_delta


def uniform(*shape: int, low: float = -1, high: float = 1) -> mx.array:
    return mx.random.uniform(low, high, shape)


def gated_arguments(
    dtype: mx.Dtype, *, keys: int = 64, vector: bool = False
) -> dict[str, mx.array]:
    """Batch 2, 3 steps, 2 heads of keys, 4 of values; decays as in a trained model."""
    mx.random.seed(7)
    steps, heads = (2, 3), 4
    decay = (*steps, heads, keys) if vector else (*steps, heads)
    return {
        "q": uniform(*steps, 2, keys).astype(dtype),
        "k": (uniform(*steps, 2, keys) / keys**0.5).astype(dtype),
        "v": uniform(*steps, heads, 16).astype(dtype),
        "g": uniform(*decay, low=0.8),
        "beta": uniform(*steps, heads, low=0).astype(dtype),
        "state": uniform(2, heads, 16, keys),
    }


def close(actual: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    got = np.array(actual.astype(mx.float32))
    wanted = np.array(expected.astype(mx.float32))
    bound = TOLERANCE[dtype] * np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


def in_float32(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.astype(mx.float32) if isinstance(value, mx.array) else value
        for name, value in arguments.items()
    }


@DTYPES
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@sampled(8)
@pytest.mark.usefixtures("unfused")
def test_gated_delta_is_its_operations(
    gated: ModuleType, dtype: mx.Dtype, keys: int, vector: bool, masked: bool
) -> None:
    arguments = gated_arguments(dtype, keys=keys, vector=vector)
    kept = mx.array([[True, True, not masked], [not masked, True, True]])
    mask = kept if masked else None
    y, state = gated.gated_delta_kernel(**arguments, mask=mask)
    expected_y, expected_state = gated.gated_delta_ops(
        **in_float32(arguments), mask=mask
    )
    assert y.dtype == dtype
    close(y, expected_y * kept[..., None, None], dtype)
    close(state, expected_state, mx.float32)
    if keys == 128 and not (vector or masked):  # packed: bit for bit its comparator
        other = gated.gated_delta_kernel_xtree(**arguments)
        assert all(map(mx.array_equal, (y, state), other))


@sampled(3)
@DTYPES
@pytest.mark.parametrize("groups", [1, 2])
def test_ssm_is_its_operations(
    monkeypatch: pytest.MonkeyPatch,
    on_metal: Callable[..., Any],
    dtype: mx.Dtype,
    groups: int,
) -> None:
    monkeypatch.setattr(ssm, "_ssm_kernel", on_metal(ssm.make_ssm_kernel))
    mx.random.seed(3)
    heads, size, states = 4, 16, 64
    arguments = {
        "hidden_states": uniform(2, 1, heads, size).astype(dtype),
        "A_log": uniform(heads),
        "B": uniform(2, 1, groups, states).astype(dtype),
        "C": uniform(2, 1, groups, states).astype(dtype),
        "D": uniform(heads),
        "dt": uniform(2, 1, heads),
        "dt_bias": uniform(heads),
        "state": uniform(2, heads, size, states),
        "time_step_limit": (0.001, 100.0),
    }
    y, state = ssm.ssm_update_kernel(**arguments)
    expected_y, expected_state = ssm.ssm_update(**in_float32(arguments))
    assert y.dtype == dtype
    close(y, expected_y, dtype)
    close(state, expected_state, mx.float32)


@DTYPES
def test_bitlinear_runs(on_metal: Callable[..., Any], dtype: mx.Dtype) -> None:
    kernel = on_metal(bitlinear_layers.make_bitlinear_kernel)
    template = {"T": dtype, "invert_weight_scales": True}
    (y,) = kernel(
        inputs=[
            mx.ones((2, 64), dtype),
            mx.zeros((16, 64), mx.uint8),
            mx.ones(1, dtype),
        ],
        template=[*template.items(), ("in_features", 64), ("out_features", 64)],
        grid=(32, 32, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(2, 64)],
        output_dtypes=[dtype],
    )
    assert mx.array_equal(y, mx.full((2, 64), -64, dtype))  # a code of 0 is -1
