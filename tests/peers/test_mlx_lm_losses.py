"""mlx-lm's Metal kernels of distillation's losses, which race in 0.32.2.

mlx-lm#1700 reports gradients near the largest float, on some runs: sums overwrite the
maxima before all simdgroups have read them. With the barriers that are missing the
kernels are right. A release that has them fails the test of the race.
"""

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import metal_emulator
from peers import emulated_modules
from support.oracles import Floats, exact

pytestmark = pytest.mark.peer

LOSSES = ("kl_forward", "kl_backward", "js_forward", "js_backward")
RACE = "race between threads .* of threadgroup variable 'shared': write after read"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MAXIMA_READ = re.compile(r"max_p = shared\[.*\];")


def repaired(*args: Any, source: str, **options: Any) -> metal_emulator.MetalKernel:
    """Makes a kernel with a barrier after its maxima, and none that orders nothing."""
    source = source.replace("mem_flags::mem_none", "mem_flags::mem_threadgroup")
    source, places = MAXIMA_READ.subn(rf"\g<0>\n{BARRIER}", source)
    assert places == 1
    return metal_emulator.metal_kernel(*args, source=source, **options)


@cache
def module(repair: bool) -> ModuleType:
    file = Path(mlx_lm.__file__).parent / "tuner" / "losses.py"
    factory = repaired if repair else metal_emulator.metal_kernel
    return emulated_modules.load("mlx_lm.tuner.losses", file, factory)


def launch(
    name: str, vocabulary: int, dtype: mx.Dtype, *, repair: bool
) -> list[mx.array]:
    """Runs a kernel of distillation's losses on 3 rows of logits."""
    q, p = logits(vocabulary, dtype)
    more = [mx.ones(3, dtype)] if name.endswith("backward") else []
    if name == "js_backward":
        more.append(mx.array(divergence(exact(q), mixture(q, p)), dtype))
    shapes = [q.shape] if more else [(3,)] * (1 + name.startswith("js"))
    kernel = getattr(module(repair), f"_{name}_kernel")
    with metal_emulator.emulated(trace=True):
        found: list[mx.array] = kernel(
            inputs=[q, p, *more],
            template=[("T", dtype), ("V", vocabulary)],
            grid=(1024, 3, 1),
            threadgroup=(1024, 1, 1),
            output_shapes=shapes,
            output_dtypes=[dtype] * len(shapes),
        )
    return found


def logits(vocabulary: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    mx.random.seed(vocabulary)
    q, p = (mx.random.uniform(-4, 4, (3, vocabulary)).astype(dtype) for _ in range(2))
    return q, p


def log_softmax(x: Floats) -> Floats:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def mixture(q: mx.array, p: mx.array) -> Floats:
    """Logits of the mean of two distributions."""
    each = [np.exp(log_softmax(exact(x))) for x in (q, p)]
    mean: Floats = np.log((each[0] + each[1]) / 2)
    return mean


def divergence(x: Floats, other: Floats) -> Floats:
    """Kullback and Leibler's, of distributions by their logits."""
    x, other = log_softmax(x), log_softmax(other)
    total: Floats = (np.exp(x) * (x - other)).sum(axis=-1)
    return total


def expected(name: str, vocabulary: int, dtype: mx.Dtype) -> list[Floats]:
    pair = logits(vocabulary, dtype)
    q, p = map(exact, pair)
    mean = mixture(*pair)
    chances = [np.exp(log_softmax(x)) for x in (q, p)]
    to_mean = [divergence(x, mean) for x in (q, p)]
    match name:
        case "kl_forward":
            return [divergence(p, q)]
        case "kl_backward":
            return [chances[0] - chances[1]]
        case "js_forward":
            return [(to_mean[0] + to_mean[1]) / 2, to_mean[0]]
        case _:
            inner = log_softmax(q) - log_softmax(mean) - to_mean[0][:, None]
            return [chances[0] * inner / 2]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("vocabulary", [4096, 5001])
def test_losses_are_those_of_float64_with_the_missing_barriers(
    name: str, vocabulary: int
) -> None:
    found = launch(name, vocabulary, mx.float32, repair=True)
    wanted = expected(name, vocabulary, mx.float32)
    for actual, each in zip(found, wanted, strict=True):
        bound = 2e-5 * np.abs(each).max()
        np.testing.assert_allclose(exact(actual), each, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_race_as_they_are(name: str, dtype: mx.Dtype) -> None:
    with pytest.raises(metal_emulator.EmulatorError, match=RACE):
        launch(name, 5001, dtype, repair=False)
