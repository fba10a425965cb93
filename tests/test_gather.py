"""Products with chosen weights: as `mx.gather_qmm`, each weight read once at most."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

import mlx_marlin
from mlx_marlin import gather, launch, scheduler
from mlx_marlin.device import Device
from mlx_marlin.gather_plan import GatherPlan
from mlx_marlin.problem import Problem

Choose = Callable[[str | None], None]

FORMATS = [
    ("affine", 4, 64),
    ("affine", 4, 32),
    ("affine", 3, 64),
    ("affine", 8, 128),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
]
K = 128


def weights(
    experts: int, n: int, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, ...]:
    w = mx.random.normal((experts, n, K), key=mx.random.key(n)).astype(dtype)
    return mx.quantize(w, group_size=group_size, bits=bits, mode=mode)


def decoded(
    native: tuple[mx.array, ...], mode: str, bits: int, group_size: int
) -> np.ndarray:
    """Returns the weights [experts, n, k] by MLX's own decoding, in float32."""
    words, *rest = native
    as_float = [
        each if each.dtype == mx.uint8 else each.astype(mx.float32) for each in rest
    ]
    w = mx.dequantize(
        words,
        *as_float,
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )
    return oracles.exact(w)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a call: few rows or many, experts that nobody chooses or all do."""
    experts = draw(st.integers(1, 6))
    return {
        "form": draw(st.sampled_from(FORMATS)),
        "experts": experts,
        "n": draw(st.sampled_from([8, 32, 41, 70])),
        "rows": draw(st.integers(1, 12)),
        "chosen": draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=90)),
        "seed": draw(st.integers(0, 99)),
        "dtype": draw(st.sampled_from([mx.float16, mx.bfloat16, mx.float32])),
        "is_sorted": draw(st.booleans()),
    }


@pytest.mark.usefixtures("kernels")
@given(call=calls())
@settings(max_examples=40)
def test_every_pair_is_the_product_that_it_names(call: dict[str, Any]) -> None:
    mode, bits, group_size = call["form"]
    dtype = call["dtype"]
    native = weights(call["experts"], call["n"], mode, bits, group_size, dtype)
    key = mx.random.key(call["seed"])
    x = mx.random.normal((call["rows"], 1, K), key=key).astype(dtype)
    chosen = sorted(call["chosen"]) if call["is_sorted"] else call["chosen"]
    random = np.random.default_rng(call["seed"])
    sources = random.integers(0, call["rows"], len(chosen))

    y = mlx_marlin.gather_qmm(
        x,
        native[0],
        native[1],
        native[2] if len(native) == 3 else None,
        lhs_indices=mx.array(sources.astype(np.uint32)),
        rhs_indices=mx.array(chosen),
        group_size=group_size,
        bits=bits,
        mode=mode,
        sorted_indices=call["is_sorted"],
    )

    assert (y.shape, y.dtype) == ((len(chosen), 1, call["n"]), dtype)
    w = decoded(native, mode, bits, group_size)
    rows = oracles.exact(x)[sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, w[np.array(chosen)])
    name = str(dtype).removeprefix("mlx.core.")
    limit = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}[name]
    assert oracles.error(y.squeeze(1), expected) < limit


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(5, 2), (2, 3, 2), (1, 1, 8)])
def test_without_rows_named_each_takes_its_own_as_in_mlx(
    shape: tuple[int, ...],
) -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x = mx.random.normal((*shape[:-1], 1, 1, K))
    chosen = mx.random.randint(0, 4, shape)

    y = mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen)
    assert y.shape == expected.shape
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_the_same_bits_every_time_and_in_any_company() -> None:
    native = weights(3, 64, "affine", 4, 64, mx.float16)
    x = mx.random.normal((30, 1, 1, K)).astype(mx.float16)
    chosen = mx.arange(30)[:, None] % 3

    y = mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen)

    assert mx.array_equal(y, mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen))


@pytest.mark.usefixtures("kernels")
def test_gradients_are_those_of_mlx() -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x = mx.random.normal((5, 1, 1, K))
    chosen = mx.random.randint(0, 4, (5, 2))

    def loss(product: Callable[..., mx.array]) -> Callable[[mx.array], mx.array]:
        return lambda x: product(x, *native, rhs_indices=chosen).square().sum()

    ours = mx.grad(loss(mlx_marlin.gather_qmm))(x)
    theirs = mx.grad(loss(mx.gather_qmm))(x)

    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    assert mx.abs(theirs).max() > 1


def kind(**changes: Any) -> gather.Kind:
    fields: dict[str, Any] = {
        "x_shape": (5, 1, 1, K),
        "x_dtype": mx.float16,
        "w_shape": (4, 40, K // 8),
        "scale_dtype": mx.float16,
        "pairs": (5, 2),
        "transpose": True,
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "is_sorted": False,
        "has_global_scale": False,
        "on_cpu": True,
    }
    return gather.Kind(**(fields | changes))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transpose": False}, "single rows times transposed"),
        ({"x_shape": (5, 1, 3, K)}, "single rows times transposed"),
        ({"bits": 7}, "affine 7-bit is not one"),
        ({"has_global_scale": True}, "do not take this form"),
        (
            {
                "mode": "nvfp4",
                "group_size": 16,
                "x_shape": (5, 1, 1, 48),
                "w_shape": (4, 40, 6),
            },
            "do not take this form of nvfp4",
        ),
        ({"pairs": (0, 2)}, "nothing to add up"),
        ({"x_dtype": mx.complex64}, "do not compute in complex64"),
    ],
)
def test_what_stock_serves_has_a_reason(changes: dict[str, Any], words: str) -> None:
    assert words in str(gather.why_not_gather(kind(**changes)))
    assert gather.why_not_gather(kind()) is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("transpose", [True, False])
def test_calls_of_other_kinds_are_mlxs(transpose: bool) -> None:
    native = weights(4, 64, "affine", 4, 64, mx.float32)
    x = mx.random.normal((5, 1, 3, K if transpose else 64))
    chosen = mx.array([0, 3, 1, 1, 2])[:, None]

    y = mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen, transpose=transpose)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen, transpose=transpose)
    assert mx.array_equal(y, expected)


def test_without_kernels_stock_serves(backend: Choose) -> None:
    backend("stock")
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x, chosen = mx.random.normal((5, 1, 1, K)), mx.array([[0], [1], [2], [3], [0]])

    y = mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen)

    assert mx.array_equal(y, mx.gather_qmm(x, *native, rhs_indices=chosen))


@pytest.mark.usefixtures("kernels")
def test_mlx_lms_layers_of_experts_are_converted_and_turned_back() -> None:
    model = SwitchGLU(64, 96, 6)
    nn.quantize(model, group_size=32, bits=4)
    x = mx.random.normal((2, 20, 64))
    chosen = mx.random.randint(0, 6, (2, 20, 2))  # 80 pairs: mlx-lm sorts them
    expected = model(x, chosen)

    mlx_marlin.optimize(model)
    y = model(x, chosen)

    assert type(model.up_proj).__name__ == "MarlinSwitchLinear"
    assert isinstance(model.up_proj, QuantizedSwitchLinear)
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-5)
    mlx_marlin.restore(model)
    assert type(model.up_proj) is QuantizedSwitchLinear
    assert mx.array_equal(model(x, chosen), expected)


def test_experts_stand_in_the_way_of_invariance() -> None:
    model = nn.Sequential(nn.Linear(64, 64), SwitchGLU(64, 96, 6))
    nn.quantize(model, group_size=32, bits=4)

    with pytest.raises(ValueError, match=r"3 quantized layers .* would stay MLX's"):
        mlx_marlin.optimize(model, invariant=True)

    assert type(model.layers[0]) is nn.QuantizedLinear


@pytest.mark.parametrize("chip", ["Apple M1 Max", "Apple M3 Max"])
def test_the_model_leaves_stock_where_rows_share_experts(chip: str) -> None:
    device = Device.named(chip)

    def reason(pairs: int) -> str | None:
        problem = Problem(m=pairs, n=768, k=2048)
        return scheduler.gather_reason(problem, 128, False, device)

    assert "times stock MLX's speed" in str(reason(8))
    assert reason(256) is None


@given(pairs=st.integers(1, 5000), experts=st.integers(1, 300), n=st.integers(1, 5000))
@settings(max_examples=200)
def test_a_plan_fits_the_hardware_and_says_itself(
    pairs: int, experts: int, n: int
) -> None:
    plan = scheduler.choose_gather(Problem(m=pairs, n=n, k=64), experts)

    assert plan.threads <= 256
    assert plan.threadgroup_bytes <= 32768
    assert plan.num_threadgroups == experts * -(-n // 32)
    assert f"{pairs} pairs over {experts} experts" in plan.explain()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 0}, "experts=0"),
        ({"fragments_m": 3}, "fragments_m=3"),
        ({"simdgroups_m": 4, "simdgroups_k": 4}, "simdgroups_m=4"),
        ({"fragments_m": 2, "simdgroups_m": 8, "simdgroups_k": 2}, "simdgroups_m=8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, int], words: str) -> None:
    sound = {"experts": 4, "fragments_m": 1, "simdgroups_m": 1, "simdgroups_k": 4}

    with pytest.raises(ValueError, match=words):
        GatherPlan(problem=Problem(m=9, n=40, k=64), subtract=False, **(sound | fields))


def test_each_weight_is_read_once_for_all_rows_that_chose_it() -> None:
    from mlx_marlin import emulator

    native = weights(4, 64, "affine", 4, 64, mx.float16)
    x = mx.random.normal((8, K)).astype(mx.float16)
    plan = GatherPlan(
        problem=Problem(m=8, n=64, k=K),
        experts=4,
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=2,
        subtract=False,
    )
    sources = mx.arange(8, dtype=mx.uint32)
    chosen = mx.array([1, 3, 1, 1, 3, 3, 3, 1], mx.uint32)

    counters = emulator.trace(launch.gather_product(plan), x, *native, sources, chosen)

    read = counters[0].of("w")
    assert read.read_bytes == 2 * 64 * K // 2  # two of four experts were chosen
    assert read.repeated_read_bytes == 0
