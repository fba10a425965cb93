"""llama.cpp's Metal kernels, unmodified, in trace mode and against float64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from peers.llama_cpp import Llama, arguments, library, sizes
from support import oracles

pytestmark = pytest.mark.peer

Array = npt.NDArray[Any]


def close(result: Array, expected: Array, tolerance: float = 2e-6) -> None:
    """Compares with a tolerance of the largest element."""
    np.testing.assert_allclose(
        result, expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


def test_the_text_has_its_entries_and_passes_the_static_check(llama: Llama) -> None:
    names = [entry.name for entry in llama.library.entries]
    assert len(names) == len({*names}) == 429
    assert len(library("GGML_METAL_USE_BF16").entries) == 458
    operands = llama.library.function("kernel_mul_mm_q4_0_f32").check()

    assert operands == {("float", "float", "half", "float")}


@pytest.mark.parametrize(
    ("name", "operation"), [("add", np.add), ("mul", np.multiply), ("div", np.divide)]
)
def test_binary_operations_broadcast(
    llama: Llama, name: str, operation: np.ufunc
) -> None:
    x, y = llama.normal(2, 3, 5, 36), llama.normal(1, 3, 1, 36)
    fields = {**sizes("0", x), **sizes("1", y), **sizes("", x)}
    given = arguments("bin", **fields, offs=0, o1=(0,) * 8)

    result = llama.run(
        name, {"args": given, "src0": x, "src1": y}, x, (5, 3, 2), (32, 1, 1)
    )

    close(result, operation(x.astype(float), y))


ONE_TO_ONE = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqr": np.square,
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("name", ONE_TO_ONE)
def test_functions_of_elements(llama: Llama, name: str) -> None:
    x = llama.normal(200)

    result = llama.run(name, {"src0": x}, x, (200, 1, 1), (1, 1, 1))

    close(result, ONE_TO_ONE[name](x.astype(float)))


def test_scale(llama: Llama) -> None:
    x = llama.normal(64)
    given = {"src0": x, "scale": 1.75, "bias": -0.5}

    close(llama.run("scale", given, x, (64, 1, 1), (1, 1, 1)), 1.75 * x - 0.5)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_mul", "norm"])
def test_norms(llama: Llama, name: str) -> None:
    x, weight = llama.normal(3, 320), llama.normal(1, 320)
    three: dict[str, Any] = {}
    for axis in (1, 2, 3):
        three[f"nef{axis}"] = (sizes("0", x)[f"ne0{axis}"], 1, 1)
        three[f"nbf{axis}"] = (sizes("0", x)[f"nb0{axis}"], x.nbytes, x.nbytes)
    fields = {**sizes("0", x), **sizes("", x), **three, "ne00_4": 80, "eps": 1e-5}
    given = {"args": arguments(name.removesuffix("_mul"), **fields), "src0": x}
    if name != "norm":
        given |= {"src1_0": weight, "src1_1": weight}

    result = llama.run(name, given, x, (3, 1, 1), (96, 1, 1), memory=128)

    exact = x.astype(float)
    if name == "norm":
        exact = exact - exact.mean(axis=1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    close(result, exact * weight if name == "rms_norm_mul" else exact)


def rows_reduced(x: Array, **others: Array) -> dict[str, int]:
    fields = {**sizes("0", x), **sizes("1", others.get("src1", x))}
    return {**fields, **sizes("", others.get("dst", x))}


def soft_max(llama: Llama, x: Array, mask: Array | None, threads: int) -> Array:
    fields = rows_reduced(x, src1=x if mask is None else mask)
    bias = {"max_bias": 0, "m0": 0, "m1": 0, "n_head_log2": 0}
    # A tensor that is absent is the first one's buffer.
    given = {
        "src0": x,
        "src1": x if mask is None else mask,
        "src2": x,
        "args": arguments("soft_max", **fields, scale=0.5, **bias),
    }
    groups = (x.shape[-2], x.shape[-3], 1)
    return llama.run("soft_max_f32", given, x, groups, (threads, 1, 1), 128)


@pytest.mark.parametrize("masked", [False, True])
def test_soft_max(llama: Llama, masked: bool) -> None:
    x, mask = llama.normal(2, 3, 70), llama.normal(1, 3, 70)

    result = soft_max(llama, x, mask if masked else None, 32)

    close(result, oracles.softmax(x.astype(float) / 2 + (mask if masked else 0)))


def test_sum_rows(llama: Llama) -> None:
    x = llama.normal(2, 3, 100)
    y = x[..., :1]
    given = {"args": arguments("sum_rows", **rows_reduced(x, dst=y)), "src0": x}

    result = llama.run("sum_rows", given, y, (3, 2, 1), (64, 1, 1), 128)

    close(result, x.astype(float).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("order", ["norm", "neox"])
def test_rope(llama: Llama, order: str) -> None:
    tokens, heads, size, rotated = 3, 2, 64, 32
    x = llama.normal(tokens, heads, size)
    at = np.array([0, 5, 77], np.int32)
    yarn = {"ext_factor": 0, "attn_factor": 1, "beta_fast": 32, "beta_slow": 1}
    fields = {**sizes("0", x), **sizes("", x), **yarn, "n_past": 0, "n_dims": rotated}
    fields |= {"n_ctx_orig": 4096, "freq_base": 1e4, "freq_scale": 1}
    fields |= {f"sect_{part}": 0 for part in range(4)}
    given = {"args": arguments("rope", **fields), "src0": x, "src1": at, "src2": x}

    groups = (heads, tokens, 1)
    result = llama.run(f"rope_{order}_f32", given, x, groups, (32, 1, 1))

    expected = x.astype(float)
    half = rotated // 2
    for pair in range(half):
        angle = at * 1e4 ** (-2 * pair / rotated)
        one, two = (pair, pair + half) if order == "neox" else (2 * pair, 2 * pair + 1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = x[..., one].astype(float), x[..., two].astype(float)
        expected[..., one] = first * cos - second * sin
        expected[..., two] = first * sin + second * cos
    close(result, expected, 2e-5)  # angles of 77 radians in float32


def test_argsort(llama: Llama) -> None:
    x = llama.normal(2, 50)
    given = {"x": x, "args": arguments("argsort", ncols=50, ncols_pad=64)}

    y, size = np.empty((2, 50), np.int32), (64, 1, 1)
    result = llama.run("argsort_f32_i32_asc", given, y, (1, 2, 1), size, 256)

    np.testing.assert_array_equal(result, x.argsort(axis=1))
