"""mlx-lm's own Metal kernels, unmodified, against float64 and traced for races.

`gated_delta` and `ssm` are in tests/metal_emulator/test_mlx_lm_kernels.py.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import metal_emulator
from peers import emulated_modules
from support.oracles import Floats, exact, softmax

pytestmark = pytest.mark.peer

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 4e-6}
"""Of the largest element: two roundings to the dtype, and sums in float32."""
DTYPES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    with metal_emulator.emulated(trace=True):
        yield


@cache
def module(name: str) -> ModuleType:
    """Returns a module of mlx-lm, such as "kernels.qk_norm", with emulated kernels."""
    file = Path(mlx_lm.__file__).parent / f"{name.replace('.', '/')}.py"
    return emulated_modules.load(f"mlx_lm.{name}", file)


def uniform(*shape: int, low: float = -1, high: float = 1) -> mx.array:
    return mx.random.uniform(low, high, shape)


def normed(x: Floats, eps: float = EPS) -> Floats:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def close(actual: mx.array, wanted: Floats, dtype: mx.Dtype) -> None:
    assert actual.dtype == dtype
    assert actual.shape == wanted.shape
    bound = TOLERANCE[dtype] * np.abs(wanted).max()
    np.testing.assert_allclose(exact(actual), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (60, 4), (128, 8), (33, 1)])
def test_expert_routing(experts: int, chosen: int) -> None:
    mx.random.seed(experts)
    logits, bias = uniform(7, experts, low=-4, high=4), uniform(experts)
    route = module("kernels.expert_routing").expert_routing
    found, weights = route(
        logits, bias, top_k=chosen, multiplier=0.5, score_eps=1e-6, route_scale=2.5
    )
    scores = sigmoid(exact(logits) * 0.5)
    wanted = np.argsort(-(scores + exact(bias)), axis=-1, kind="stable")[:, :chosen]
    np.testing.assert_array_equal(np.array(found), wanted)
    best = np.take_along_axis(scores, wanted, -1)
    close(weights, 2.5 * best / (best.sum(-1, keepdims=True) + 1e-6), mx.float32)


@DTYPES
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", [100, 512, 2568])
def test_norm_add_norm(size: int, scaled: bool, dtype: mx.Dtype) -> None:
    mx.random.seed(size)
    branch, stream = uniform(3, size).astype(dtype), uniform(3, size)
    alpha, beta, next_weight = (uniform(size, low=0.5, high=2) for _ in range(3))
    weight = uniform(size, low=0.5) if scaled else None
    kernels = module("kernels.norm_add_norm")
    norm = SimpleNamespace(weight=next_weight, eps=EPS)
    arguments = {"alpha": alpha, "beta": beta, "post_weight": weight, "post_eps": EPS}
    both = kernels.norm_add_norm(branch, stream, next_norm=norm, **arguments)
    alone, none = kernels.norm_add_norm(branch, stream, next_norm=None, **arguments)
    again = kernels.pre_norm(both[0], norm, dtype=dtype)
    assert none is None
    factor = 1 if weight is None else exact(weight)
    added = normed(exact(branch) * factor)
    summed = exact(alpha) * exact(stream) + exact(beta) * added
    # The norm is rounded to the branch's dtype before it is added.
    bound = TOLERANCE[dtype] * np.abs(summed).max()
    for stream_found in (both[0], alone):
        np.testing.assert_allclose(exact(stream_found), summed, rtol=0, atol=bound)
    close(both[1], normed(summed) * exact(next_weight), dtype)
    assert mx.array_equal(again, both[1])


@DTYPES
@pytest.mark.parametrize(("experts", "size"), [(1, 100), (4, 768), (8, 2568)])
def test_post_expert_norm_combine(experts: int, size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(size)
    outputs = uniform(3, experts, size).astype(dtype)
    weights = uniform(3, experts, low=0).astype(dtype)
    scale = uniform(size, low=0.5, high=2)
    combine = module("kernels.post_expert_norm_combine").post_expert_norm_combine
    y = combine(outputs, weights, norm_weight=scale, eps=EPS)
    wanted = normed(exact(outputs) * exact(scale)) * exact(weights)[..., None]
    wanted = wanted.sum(axis=1)
    assert y.dtype == dtype
    # Each expert's part is rounded as it is added.
    bound = experts * TOLERANCE[dtype] * np.abs(wanted).max()
    np.testing.assert_allclose(exact(y), wanted, rtol=0, atol=bound)


def heads(dtype: mx.Dtype, features: int) -> tuple[mx.array, list[Floats]]:
    """Rows with q, k and others of (4, 2) heads, and q and k normalized."""
    mx.random.seed(features)
    x = uniform(2, 3, 2 * 6 * features).astype(dtype)
    parts = normed(exact(x).reshape(2, 3, 12, features))
    return x, [parts[:, :, :4] * 0.125, parts[:, :, 4:6]]


SIZES = {"n_heads": 4, "n_kv_heads": 2, "eps": EPS, "query_scale": 0.125}


@DTYPES
@pytest.mark.parametrize("features", [24, 64, 128])
def test_qk_norm(features: int, dtype: mx.Dtype) -> None:
    x, wanted = heads(dtype, features)
    found = module("kernels.qk_norm").qk_norm(x, head_dim=features, **SIZES)
    for actual, expected in zip(found, wanted, strict=True):
        close(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("features", [24, 128])
@pytest.mark.parametrize("offset", [5, (0, 9)], ids=str)
def test_qk_norm_rope(
    features: int, offset: int | tuple[int, int], dtype: mx.Dtype
) -> None:
    x, plain = heads(dtype, features)
    found = module("kernels.qk_norm_rope").qk_norm_rope(
        x,
        head_dim=features,
        rope_base=10000.0,
        offset=offset if isinstance(offset, int) else mx.array(offset),
        **SIZES,
    )
    first = np.broadcast_to(np.array(offset), 2)
    positions = first[:, None] + np.arange(3)
    frequencies = 10000.0 ** -(np.arange(features // 2) / (features // 2))
    angle = (positions[..., None] * frequencies)[:, :, None]
    turn = np.exp(1j * angle)
    for actual, part in zip(found, plain, strict=True):
        turned = (part[..., ::2] + 1j * part[..., 1::2]) * turn
        expected = np.stack([turned.real, turned.imag], axis=-1).reshape(part.shape)
        close(actual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("features", [24, 64])
def test_rms_norm_sigmoid_gate(features: int, dtype: mx.Dtype) -> None:
    mx.random.seed(features)
    # As attention leaves it: a view whose rows are not contiguous.
    x = uniform(2, 5, 3, features).astype(dtype).swapaxes(1, 2)
    gate = uniform(2, 5, 3 * features, low=-4, high=4).astype(dtype)
    apply = module("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate
    y = apply(x, gate, eps=EPS)
    rows = normed(exact(x)).swapaxes(1, 2).reshape(2, 5, -1)
    close(y, rows * sigmoid(exact(gate)), dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_wkv7(dtype: mx.Dtype) -> None:
    """rwkv7's recurrence, step by step."""
    mx.random.seed(1)
    shape = (2, 3, 2, 64)
    r, k, v, a, b = (uniform(*shape).astype(dtype) / 8 for _ in range(5))
    w = uniform(*shape, low=0.8).astype(dtype)
    state = uniform(2, 2, 64, 64).astype(dtype)
    y, after = module("models.rwkv7").wkv7_kernel(r, w, k, v, a, b, state)
    steps, current = [], exact(state)
    each = [exact(x) for x in (r, w, k, v, a, b)]
    for t in range(3):
        rt, wt, kt, vt, at, bt = (x[:, t] for x in each)
        added = np.einsum("bhij,bhj->bhi", current, at)[..., None] * bt[:, :, None]
        current = current * wt[:, :, None] + vt[..., None] * kt[:, :, None] + added
        steps.append(np.einsum("bhij,bhj->bhi", current, rt))
    close(y, np.stack(steps, axis=1), dtype)
    close(after, current, dtype)


@DTYPES
@pytest.mark.parametrize(("blocks", "size"), [(1, 100), (3, 1100)])
def test_attention_over_residuals(blocks: int, size: int, dtype: mx.Dtype) -> None:
    """kimi_k3's mixture of the residual streams of earlier blocks."""
    mx.random.seed(size)
    raw = uniform(blocks, 2, 2, size).astype(dtype)
    partial, weight = uniform(2, 2, size).astype(dtype), uniform(size)
    inverse = 1 / np.sqrt((exact(raw) ** 2).mean(-1) + EPS)
    kernel = module("models.kimi_k3")._attn_res_kernel
    threads = module("models.kimi_k3")._ATTN_RES_THREADS
    (y,) = kernel(
        inputs=[raw, mx.array(inverse), partial, weight, mx.array([EPS]), 4],
        template=[("InT", dtype), ("K", blocks), ("D", size), ("THREADS", threads)],
        grid=(threads, 4, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[partial.shape],
        output_dtypes=[dtype],
    )
    streams = np.concatenate([exact(raw), exact(partial)[None]])
    scale = 1 / np.sqrt((streams**2).mean(-1) + EPS)
    logits = (streams @ exact(weight)) * scale
    shares = softmax(logits.T).T
    close(y, (shares[..., None] * streams).sum(axis=0), dtype)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (300, 4), (5, 3)])
def test_sinkhorn(count: int, size: int) -> None:
    """deepseek_v41's normalization of columns and rows in turn."""
    mx.random.seed(count)
    given = uniform(count, size, size, low=0.1)
    kernel = module("models.deepseek_v41")._sinkhorn_kernel
    (found,) = kernel(
        inputs=[given, mx.array([1e-6])],
        template=[("HC", size), ("ITERS", 3)],
        grid=(count, 1, 1),
        threadgroup=(min(count, 256), 1, 1),
        output_shapes=[given.shape],
        output_dtypes=[mx.float32],
    )
    wanted = exact(given)
    for axis in (-2, -1, -2, -1, -2):
        wanted = wanted / (wanted.sum(axis=axis, keepdims=True) + 1e-6)
    close(found, wanted, mx.float32)


@DTYPES
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("columns", [128, 132, 300])
def test_bitlinear(columns: int, inverted: bool, dtype: mx.Dtype) -> None:
    """Ternary weights of two bits, four rows in a byte."""
    mx.random.seed(columns)
    rows = 20
    ternary = np.random.default_rng(0).integers(-1, 2, (rows, columns))
    codes = (ternary + 1).reshape(4, rows // 4, columns)
    packed = sum(codes[i] << 2 * i for i in range(4)).astype(np.uint8)
    layer = module("models.bitlinear_layers").BitLinear(
        columns, rows, bias=False, invert_weight_scales=inverted
    )
    layer.weight, layer.weight_scale = mx.array(packed), mx.array([0.5], dtype)
    x = uniform(3, columns).astype(dtype)
    y = layer(x)
    close(y, exact(x) @ ternary.T * (2.0 if inverted else 0.5), dtype)
