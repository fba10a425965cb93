"""RMSNorm fused into a CUDA product: kernels on the CPU, plans and layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.cuda import backend as cuda
from mlx_marlin.backends.cuda import limits, source
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.source import NORM, OPERANDS
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import EPSILON, GATED, NORMED_WAYS, Case, normalized
from support.format_cases import rounded
from support.gate_and_up import layer_of
from support.oracles import exact
from support.profiles import sampled
from support.rotated_layers import norm_module

H200 = cuda_cases.h200()
PACKED = ("affine", 4, 64, "marlin", "float16")
RTX = CudaDevice.named("NVIDIA GeForce RTX 4090")
FORMATS = (
    ("affine", 4, 128, "marlin"),
    ("affine", 3, 32, "marlin"),
    ("symmetric", 8, 64, "marlin"),
    ("mxfp4", 4, 32, "marlin"),
    ("affine", 4, 64, "mlx"),
)


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("m", "way"), NORMED_WAYS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_ones_are_exact(m: int, way: dict[str, Any], dtype: str) -> None:
    weight, x, _ = cuda_cases.integers(dtype, m, way)
    x = mx.where(x == 0, mx.array(1, x.dtype), x)  # each mean square is 1
    norm = (mx.arange(x.shape[-1]) % 3 - 1).astype(x.dtype)
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)

    y = cuda_on_cpu.run(cuda_on_cpu.plan_of(case, norm=0.0), x, weight, x, x, x, norm)

    expected = (exact(x) * exact(norm)) @ weight.decoded.T
    assert np.array_equal(exact(y), rounded(expected, dtype))


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_weight(format: tuple[str, int, int, str], dtype: str) -> None:
    cuda_on_cpu.check((*format, dtype, *NORMED_WAYS[1]), norm=EPSILON)


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("epilogue", cuda_cases.EPILOGUES, ids=str)
def test_epilogues_follow(epilogue: Epilogue) -> None:
    cuda_on_cpu.check((*PACKED, *NORMED_WAYS[1]), epilogue=epilogue, norm=EPSILON)


@pytest.mark.usefixtures("on_cpu")
def test_arrays_may_begin_anywhere() -> None:
    names = (*OPERANDS, *NORM)
    with metal_emulator.emulated(trace=True):  # no race, nothing outside
        cuda_on_cpu.check((*PACKED, *NORMED_WAYS[1]), names=names, norm=EPSILON)


RESULTS: tuple[dict[str, Any], ...] = ({}, {"gated": True}, {"parts": (64, 128)})


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [(), (1,), (2, 4), (3, 3), (0,)], ids=str)
@pytest.mark.parametrize("result", RESULTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_takes_its_norm(
    rows: tuple[int, ...], result: dict[str, Any], bias: bool
) -> None:
    layer, norm = layer_of(bias=bias), norm_module()
    x = 3 * mx.random.normal((*rows, 128), key=mx.random.key(1)).astype(mx.float16)

    y = epilogues.whole(layer.normed(x, norm, **result))

    normed = normalized(x, norm.weight, norm.eps) if x.size else np.zeros(x.shape)
    native = layer_of(layout="mlx", bias=bias).native()
    expected = oracles.product(mx.array(normed), *native, group_size=64)
    expected = expected + exact(layer["bias"]) if bias else expected
    gated = "gated" in result
    expected = epilogues.finished(expected, (), GATED) if gated else expected
    assert (y.shape, y.dtype) == (expected.shape, mx.float16)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    fused = any(plan.problem.norm for plan in graph.plans_built())
    few = 0 < x.size // 128 <= 8 and len(rows) > 0
    assert fused == (few and not (bias and gated))


@pytest.mark.usefixtures("on_cpu")
def test_gradients_are_those_of_norm_and_product() -> None:
    layer, norm = layer_of(), norm_module()
    x = mx.random.normal((2, 128), key=mx.random.key(1)).astype(mx.float16)
    weight = norm.weight

    def inside(x: mx.array, weight: mx.array) -> mx.array:
        norm.weight = weight
        y: mx.array = layer.normed(x, norm)
        return (y * y).sum()

    def apart(x: mx.array, weight: mx.array) -> mx.array:
        y: mx.array = layer_of("mlx")(mx.fast.rms_norm(x, weight, norm.eps))
        return (y * y).sum()

    both = mx.grad(inside, argnums=(0, 1))(x, weight)
    assert any(plan.problem.norm for plan in graph.plans_built())
    for ours, own in zip(both, mx.grad(apart, argnums=(0, 1))(x, weight), strict=True):
        assert oracles.error(ours, exact(own)) < 1e-3


@pytest.mark.usefixtures("on_cpu")
def test_two_norms_of_a_layer_are_told_apart() -> None:
    layer, norm = layer_of(), norm_module()
    x = mx.random.normal((1, 128), key=mx.random.key(1)).astype(mx.float16)
    first = layer.normed(x, norm)
    norm.eps = 1.0

    second = layer.normed(x, norm)

    expected = exact(layer(norm(x)))
    assert oracles.error(first, expected) > 0.1
    assert oracles.error(second, expected) < oracles.TOLERANCES["float16"]


@pytest.mark.usefixtures("on_cpu")
def test_a_norm_of_other_features_is_refused_by_mlx() -> None:
    norm = nn.RMSNorm(64)
    norm.weight = norm.weight.astype(mx.float16)
    with pytest.raises(ValueError, match="rms_norm"):
        layer_of().normed(mx.zeros((1, 128), mx.float16), norm)


@pytest.mark.parametrize(
    "how", ["stock", "invariant", "mlx", "wide norm", "another norm"]
)
def test_where_kernels_have_no_norm_it_comes_first(
    how: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("stock" if how == "stock" else "on_cpu")
    layer = layer_of("mlx" if how == "mlx" else "marlin")
    layer.invariant = how == "invariant"
    norm = norm_module(Shifted if how == "another norm" else nn.RMSNorm)
    if how == "wide norm":
        norm.weight = norm.weight.astype(mx.float32)
    x = mx.random.normal((2, 128)).astype(mx.float16)

    assert mx.array_equal(layer.normed(x, norm), layer(norm(x)))
    assert not any(plan.problem.norm for plan in graph.plans_built())


class Shifted(nn.RMSNorm):
    """A norm as some models have it, whose weight is 1 more than it says."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight, self.eps)


@given(
    m=st.integers(1, 8),
    n=st.integers(1, 3000),
    k=st.integers(1, 64).map(lambda groups: 64 * groups),
    dtype=st.sampled_from(limits.DTYPES),
    device=st.sampled_from([H200, RTX]),
)
def test_plans_have_whole_rows_in_a_block(
    m: int, n: int, k: int, dtype: str, device: CudaDevice
) -> None:
    asked = problem_of(m, n, k, layout="marlin", dtype=dtype, norm=1e-5)

    plan = planner.choose(asked, device)

    assert (plan.kernel, plan.reduction) == ("mma", "none")
    assert limits.NORMED_BYTES < plan.threadgroup_bytes <= device.shared_bytes
    assert "normalized rows (eps 1e-05)" in asked.explain()
    assert "normalized" not in replace(asked, norm=None).explain()


def test_a_kernel_asks_for_the_same_memory_whatever_the_rows_are() -> None:
    """MLX asks the driver once for a kernel's text, at its first call."""
    plans = [
        planner.choose(problem_of(m, 192, 1024, layout="marlin", norm=1e-5), H200)
        for m in (1, 3, 8)
    ]

    assert len({source.of_product(plan) for plan in plans}) == 1
    assert len({plan.threadgroup_bytes for plan in plans}) == 1


def test_rows_are_normalized_before_where_blocks_would_do_it_too_often() -> None:
    gate_and_up = problem_of(1, 34816, 5120, layout="marlin", epilogue=GATED, norm=1e-5)
    narrow = problem_of(1, 512, 16384, layout="marlin", norm=1e-5)

    for asked in (gate_and_up, narrow):  # waves of blocks; splits would be faster
        assert "normalize the rows again" in str(cuda.handover(asked, RTX))
        assert cuda.handover(asked, H200) is None


def planned(
    m: int, n: int, k: int, *, invariant: bool = False, **overrides: Any
) -> Plan:
    asked = problem_of(m, n, k, layout="marlin", norm=1e-5, invariant=invariant)
    return planner.make(asked, device=H200, **overrides)


NEEDED = "needs kernel='mma' and reduction='none'"
NEGATIVE = "must be at least 0 and of one product"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(planned, 9, 64, 128), "8 rows in 77824 bytes, and there are 9 of 128"),
        (partial(planned, 8, 64, 4352), "and there are 8 of 4352"),
        (partial(planned, 1, 64, 128, invariant=True), "no rows with invariant=True"),
        (partial(Problem, m=1, n=64, k=64, norm=1e-5, batch=2), NEGATIVE),
        (partial(Problem, m=1, n=64, k=64, norm=-1e-5), NEGATIVE),
        (partial(planned, 8, 192, 1024, strategy="split_k", k_parallel=2), NEEDED),
        *((partial(planned, 8, 192, 1024, kernel=k), NEEDED) for k in OF_CUDA[1:]),
    ],
)
def test_what_a_norm_cannot_have_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()
