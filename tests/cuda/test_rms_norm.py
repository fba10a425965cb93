"""RMSNorm fused into a CUDA product: kernels on the CPU, plans and layers."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import launcher, planner
from mlx_marlin.backends.cuda import limits, source
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import Problem, problem_of
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import EPSILON, GATED, NORMED_WAYS, Case, norm_of, normalized
from support.format_cases import arguments, rounded
from support.marks import needs_emulator
from support.oracles import exact
from support.profiles import sampled

H200 = cuda_cases.h200()
RTX = CudaDevice.named("NVIDIA GeForce RTX 4090")
FORMATS = (
    ("affine", 4, 128, "marlin"),
    ("affine", 3, 32, "marlin"),
    ("symmetric", 8, 64, "marlin"),
    ("mxfp4", 4, 32, "marlin"),
    ("affine", 4, 64, "mlx"),
)


@sampled(1)
@needs_emulator
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
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_weight(format: tuple[str, int, int, str], dtype: str) -> None:
    cuda_on_cpu.check_normed((*format, dtype, *NORMED_WAYS[1]))


@sampled(2)
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("epilogue", cuda_cases.EPILOGUES, ids=str)
def test_epilogues_follow(epilogue: Epilogue) -> None:
    m, way = NORMED_WAYS[1]
    case: Case = ("affine", 4, 64, "marlin", "float16", m, way)
    weight, x = cuda_cases.draw(case)
    norm, finish = norm_of(x), cuda_cases.operands(m)
    plan = cuda_on_cpu.plan_of(case, epilogue=epilogue, norm=EPSILON)

    y = epilogues.whole(cuda_on_cpu.run(plan, x, weight, *finish, norm))

    product = normalized(x, norm, EPSILON) @ weight.decoded.T
    expected = epilogues.finished(product, finish, epilogue)
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
def test_arrays_may_begin_anywhere() -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", *NORMED_WAYS[1])
    weight, x = cuda_cases.draw(case)
    norm = norm_of(x)
    arrays = (x, *arguments(weight, "marlin"), norm)
    x, *others, moved = map(cuda_cases.moved, arrays)

    with metal_emulator.emulated(trace=True):  # no race, nothing outside
        y = launcher.product(cuda_on_cpu.plan_of(case, norm=EPSILON))(
            x, *others, x, x, x, moved
        )

    expected = normalized(x, norm, EPSILON) @ weight.decoded.T
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]


RESULTS: tuple[dict[str, Any], ...] = ({}, {"gated": True}, {"parts": (64, 128)})


@sampled(2)
@needs_emulator
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
    fused = any(plan.problem.norm for plan in launcher.plans_built())
    few = 0 < x.size // 128 <= 8 and len(rows) > 0
    assert fused == (few and not (bias and gated))


@needs_emulator
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
    assert any(plan.problem.norm for plan in launcher.plans_built())
    for ours, own in zip(both, mx.grad(apart, argnums=(0, 1))(x, weight), strict=True):
        assert oracles.error(ours, exact(own)) < 1e-3


@needs_emulator
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


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
def test_a_norm_of_other_features_is_refused_by_mlx() -> None:
    norm = nn.RMSNorm(64)
    norm.weight = norm.weight.astype(mx.float16)
    with pytest.raises(ValueError, match="rms_norm"):
        layer_of().normed(mx.zeros((1, 128), mx.float16), norm)


@pytest.mark.usefixtures("stock")
def test_with_stock_mlx_the_norm_comes_first() -> None:
    assert_apart(layer_of(), norm_module())


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("how", ["invariant", "mlx", "wide norm", "another norm"])
def test_and_where_kernels_have_none(how: str) -> None:
    layer = layer_of(layout="mlx" if how == "mlx" else "marlin")
    layer.invariant = how == "invariant"
    norm = norm_module(Shifted if how == "another norm" else nn.RMSNorm)
    assert_apart(layer, norm, mx.float32 if how == "wide norm" else mx.float16)


class Shifted(nn.RMSNorm):
    """A norm as some models have it, whose weight is 1 more than it says."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight, self.eps)


def assert_apart(
    layer: MarlinLinear, norm: nn.RMSNorm, dtype: mx.Dtype = mx.float16
) -> None:
    x = mx.random.normal((2, 128)).astype(mx.float16)
    norm.weight = norm.weight.astype(dtype)
    assert mx.array_equal(layer.normed(x, norm), layer(norm(x)))
    assert not any(plan.problem.norm for plan in launcher.plans_built())


def norm_module(cls: type[nn.RMSNorm] = nn.RMSNorm) -> nn.RMSNorm:
    norm = cls(128, eps=EPSILON)
    norm.weight = norm_of(mx.zeros((1, 128), mx.float16))
    return norm


def layer_of(layout: str = "marlin", *, bias: bool = False) -> MarlinLinear:
    mx.random.seed(3)
    linear = nn.Linear(128, 192, bias=bias)
    linear.set_dtype(mx.float16)
    return MarlinLinear.from_linear(linear, 64, 4, layout=layout)


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
        assert "normalize the rows again" in str(planner.stock_reason(asked, RTX))
        assert planner.stock_reason(asked, H200) is None


@pytest.mark.parametrize(
    ("m", "k", "more", "words"),
    [
        (9, 128, {}, "up to 8 rows in 77824 bytes, and there are 9 of 128"),
        (8, 4352, {}, "and there are 8 of 4352"),
        (1, 128, {"invariant": True}, "no rows with invariant=True"),
    ],
)
def test_more_rows_are_refused(
    m: int, k: int, more: dict[str, Any], words: str
) -> None:
    asked = problem_of(m, 64, k, layout="marlin", norm=1e-5, **more)
    with pytest.raises(ValueError, match=words):
        planner.make(asked, device=H200)


@pytest.mark.parametrize("more", [{"batch": 2}, {"norm": -1e-5}])
def test_a_norm_is_of_one_product_and_adds_nothing_negative(
    more: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and of one product"):
        Problem(**({"m": 1, "n": 64, "k": 64, "norm": 1e-5} | more))


@pytest.mark.parametrize(
    "overrides",
    [{"strategy": "split_k", "k_parallel": 2}, *({"kernel": k} for k in OF_CUDA[1:])],
)
def test_other_plans_are_refused(overrides: dict[str, Any]) -> None:
    asked = problem_of(8, 192, 1024, layout="marlin", norm=1e-5)
    with pytest.raises(ValueError, match="needs kernel='mma' and reduction='none'"):
        planner.make(asked, device=H200, **overrides)


def test_the_text_declares_the_rows_and_reads_the_norm() -> None:
    asked = problem_of(1, 192, 1024, layout="marlin", epilogue=GATED, norm=1e-5)
    plan = planner.choose(asked, H200)
    text = source.of_product(plan)

    assert text.name == "marlin_mma_gated_normed"
    assert text.input_names == ("x", "w", "scales", "norm", "numbers")
    assert "const auto rows = marlin::normed<EPSILON>(x, norm);\n" in text.source
