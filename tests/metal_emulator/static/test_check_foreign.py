"""mlx-lm's own Metal kernels, which run on every Mac, pass the static check."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import bitlinear_layers, gated_delta, ssm

from metal_emulator import check
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = needs_emulator

DTYPES = pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str
)
Maker = Callable[..., Any]


class Checked:
    """A kernel that is checked when it is called, and computes nothing."""

    def __init__(self, **kernel: Any) -> None:
        self.kernel = kernel
        self.checks = 0

    def __call__(self, **call: Any) -> list[mx.array]:
        self.checks += 1
        check(**self.kernel, calls=[call])
        results = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in results]


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Calls what makes a kernel as if there were a GPU."""

    def make(maker: Maker, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(mx.metal, "is_available", lambda: True)
            patch.setattr(mx.fast, "metal_kernel", Checked)
            return maker(*arguments)

    return make


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, on_metal: Maker) -> ModuleType:
    """The module `gated_delta` as it is on a Mac."""
    for suffix, mask, vector in (
        ("", False, False),
        ("_vec", False, True),
        ("_masked", True, False),
        ("_vec_masked", True, True),
    ):
        kernel = on_metal(gated_delta._make_gated_delta_kernel, mask, vector)
        monkeypatch.setattr(gated_delta, f"_gated_delta_kernel{suffix}", kernel)
    kernel = on_metal(gated_delta._make_gated_delta_packed_kernel)
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", kernel)
    return gated_delta


@sampled(8)
@DTYPES
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta_passes(
    gated: ModuleType, dtype: mx.Dtype, keys: int, vector: bool, masked: bool
) -> None:
    steps, heads = (2, 3), 4
    gated.gated_delta_kernel(
        q=mx.zeros((*steps, 2, keys), dtype),
        k=mx.zeros((*steps, 2, keys), dtype),
        v=mx.zeros((*steps, heads, 16), dtype),
        g=mx.zeros((*steps, heads, keys) if vector else (*steps, heads)),
        beta=mx.zeros((*steps, heads), dtype),
        state=mx.zeros((2, heads, 16, keys)),
        mask=mx.ones(steps, mx.bool_) if masked else None,
    )

    kernels = (made for made in vars(gated).values() if isinstance(made, Checked))
    assert sum(kernel.checks for kernel in kernels) == 1


@DTYPES
def test_ssm_passes(
    monkeypatch: pytest.MonkeyPatch, on_metal: Maker, dtype: mx.Dtype
) -> None:
    kernel = on_metal(ssm.make_ssm_kernel)
    monkeypatch.setattr(ssm, "_ssm_kernel", kernel)
    ssm.ssm_update_kernel(
        hidden_states=mx.zeros((2, 1, 4, 16), dtype),
        A_log=mx.zeros(4),
        B=mx.zeros((2, 1, 2, 64), dtype),
        C=mx.zeros((2, 1, 2, 64), dtype),
        D=mx.zeros(4),
        dt=mx.zeros((2, 1, 4)),
        dt_bias=mx.zeros(4),
        state=mx.zeros((2, 4, 16, 64)),
        time_step_limit=(0.001, 100.0),
    )

    assert kernel.checks == 1


@DTYPES
def test_bitlinear_passes(on_metal: Maker, dtype: mx.Dtype) -> None:
    kernel = on_metal(bitlinear_layers.make_bitlinear_kernel)
    kernel(
        inputs=[
            mx.zeros((2, 64), dtype),
            mx.zeros((16, 64), mx.uint8),
            mx.ones(1, dtype),
        ],
        template=[
            ("T", dtype),
            ("invert_weight_scales", True),
            ("in_features", 64),
            ("out_features", 64),
        ],
        grid=(32, 32, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(2, 64)],
        output_dtypes=[dtype],
    )
