"""mlx-lm's own Metal kernels, unmodified, against the operations that they replace."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm

import metal_emulator
from support.profiles import sampled

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Of the largest element: a rounding of the result, and float32 sums in any order."""

pytestmark = pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason=str(metal_emulator.unavailable())
)


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls what makes a kernel as if there were a GPU: the emulator's is made."""

    def make(maker: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(mx.metal, "is_available", lambda: True)
            patch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
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
    kernel = on_metal(gated_delta._make_gated_delta_kernel_xtree)
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_xtree", kernel)
    kernel = on_metal(gated_delta._make_gated_delta_packed_kernel)
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", kernel)
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


def agree(module: ModuleType, dtype: mx.Dtype, arguments: dict[str, Any]) -> None:
    """The kernel's two results are those of the same arguments in float32."""
    y, state = module.gated_delta_kernel(**arguments)
    expected_y, expected_state = module.gated_delta_ops(**in_float32(arguments))
    assert y.dtype == dtype
    close(y, expected_y, dtype)
    close(state, expected_state, mx.float32)


@sampled(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta_is_its_operations(
    gated: ModuleType, dtype: mx.Dtype, vector: bool
) -> None:
    agree(gated, dtype, gated_arguments(dtype, vector=vector))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_packed_gated_delta_is_its_operations(
    gated: ModuleType, dtype: mx.Dtype
) -> None:
    agree(gated, dtype, gated_arguments(dtype, keys=128))


def test_packed_gated_delta_is_bit_for_bit_its_comparator(gated: ModuleType) -> None:
    arguments = gated_arguments(mx.float16, keys=128)
    packed = gated.gated_delta_kernel(**arguments)
    comparator = gated.gated_delta_kernel_xtree(**arguments)
    for one, other in zip(packed, comparator, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta_leaves_masked_steps_out(gated: ModuleType, vector: bool) -> None:
    arguments = gated_arguments(mx.float32, vector=vector)
    mask = mx.array([[True, True, False], [False, True, True]])
    y, state = gated.gated_delta_kernel(**arguments, mask=mask)
    expected_y, expected_state = gated.gated_delta_ops(**arguments, mask=mask)
    close(y, expected_y * mask[..., None, None], mx.float32)
    close(state, expected_state, mx.float32)


@sampled(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
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
