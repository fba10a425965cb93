"""How much longer than stock MLX a call of ours takes to build its graph.

Measured while tracing, so no kernel runs: works on any machine. The arrays are not
those of the trace, so a call does what it does outside of one. The two calls take
turns, and the least of the medians counts, because a busy machine only adds time.
Layers and a model are those that stock MLX serves throughout, as it serves one stream
on most Macs.

Usage: python benchmarks/host_overhead.py
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

os.environ["MLX_MARLIN_BACKEND"] = "metal"

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import mlx_marlin
from mlx_marlin.backends import launch, selection
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.integrations.mlx_lm.joining import join_layers
from mlx_marlin.integrations.mlx_lm.module_changes import Changes
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products import dispatch
from mlx_marlin.weights.formats import LAYOUTS

CALLS = 300
ROUNDS = 40
LIMITS = {1: 7.0, 2: 12.0}
"""Microseconds more than stock, by dispatches."""
LAYER_LIMIT = 0.7
"""Microseconds more than stock's layer, where stock MLX serves."""
MODEL_LIMIT = 1.03
"""Times stock's host time for a token, where stock MLX serves."""
BLOCKS, TOKENS = 28, 1
IMPORT_LIMIT = 50.0
"""Milliseconds more than importing MLX."""
PRODUCTS = ("gemv", "gemm_register", "gemm_staged")
SHAPES = ((8, 4096, 4096), (8, 128, 16384))
"""m, n, k: one whole plan, one that splits k."""


def microseconds(call: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def compare(m: int, n: int, k: int) -> tuple[int, float, float]:
    """Returns the dispatches of ours, and microseconds of stock and of ours."""
    x = mx.zeros((m, k), mx.float16)
    native = mx.quantize(mx.zeros((n, k), mx.float16))
    times: dict[str, list[float]] = {"stock": [], "ours": []}

    def trace(traced: mx.array) -> mx.array:
        for _ in range(ROUNDS):
            for name, product in (
                ("stock", mx.quantized_matmul),
                ("ours", mlx_marlin.quantized_matmul),
            ):
                times[name].append(microseconds(lambda f=product: f(x, *native)))
        return traced

    mx.export_function(lambda _: None, trace, x)
    dispatches = launch.plans_built()[-1].dispatches
    return dispatches, *(min(_fifths(times[name])) for name in ("stock", "ours"))


def in_turn(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the least of the medians of calls that take turns, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    return {name: min(_fifths(taken)) for name, taken in times.items()}


def of_layers() -> dict[str, float]:
    """Returns microseconds that layers of ours take more than stock's."""
    linear = [nn.QuantizedLinear(256, 256, bias) for bias in (False, True, False)]
    model = nn.Module()
    for name, layer in zip("qkv", linear[:1] + linear[2:] * 2, strict=True):
        setattr(model, f"{name}_proj", MarlinLinear.from_quantized(layer))
    join_layers(model, Changes())
    parts = [model.q_proj, model.k_proj, model.v_proj]
    experts = QuantizedSwitchLinear(256, 256, 8, bias=False)
    x, row, chosen = mx.zeros((1, 256)), mx.zeros((1, 1, 256)), mx.zeros(2, mx.uint32)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "linear": (
            _of(linear[0], x),
            _of(MarlinLinear.from_quantized(linear[0]), x),
            1,
        ),
        "linear with a bias": (
            _of(linear[1], x),
            _of(MarlinLinear.from_quantized(linear[1]), x),
            1,
        ),
        "joined (each of 3)": (
            lambda: [linear[0](x) for _ in parts],
            lambda: [part(x) for part in parts],
            3,
        ),
        "experts": (
            _of(experts, row, chosen),
            _of(MarlinSwitchLinear.from_quantized(experts), row, chosen),
            1,
        ),
    }
    more = {}
    for name, (stock, ours, count) in pairs.items():
        taken = in_turn({"stock": stock, "ours": ours})
        more[name] = (taken["ours"] - taken["stock"]) / count
    return more


def _of(layer: Callable[..., mx.array], *arrays: mx.array) -> Callable[[], mx.array]:
    return lambda: layer(*arrays)


def of_model() -> float:
    """Returns how many times stock's host time a token takes through our layers."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=BLOCKS,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=128,
    )
    models = {"stock": llama.Model(args), "ours": llama.Model(args)}
    for model in models.values():
        nn.quantize(model)
        mx.eval(model.parameters())
    mlx_marlin.optimize(models["ours"])
    token = mx.zeros((1, 1), mx.int32)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(5 * ROUNDS):
        for name, model in models.items():
            cache = make_prompt_cache(model)
            mx.eval(model(token, cache=cache))
            start = time.perf_counter()
            for _ in range(TOKENS):
                y = model(token, cache=cache)
            times[name].append(time.perf_counter() - start)
            mx.eval(y)
    # A token takes so long that something interrupts most: only the least tells.
    return min(times["ours"]) / min(times["stock"])


def _fifths(values: list[float]) -> list[float]:
    size = len(values) // 5
    return [statistics.median(values[i * size : (i + 1) * size]) for i in range(5)]


def import_milliseconds(statement: str) -> float:
    """Returns the least of some fresh interpreters' times for an import statement."""
    code = (
        "import time; start = time.perf_counter(); "
        f"{statement}; print((time.perf_counter() - start) * 1e3)"
    )
    runs = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        for _ in range(7)
    )
    return min(float(run.stdout) for run in runs)


def text_bytes() -> dict[str, int]:
    """Returns the bytes of text that MLX joins and hashes for each Metal kernel."""
    kernels = (
        *(metal_source.product_source(kernel) for kernel in PRODUCTS),
        metal_source.gather_source(),
        metal_source.reduce_source(),
        metal_source.dequantize_source(),
        *map(metal_source.repack_source, LAYOUTS),
    )
    return {text.name: len(text.header) + len(text.source) for text in kernels}


def print_text_bytes() -> None:
    for name, size in text_bytes().items():
        print(f"text of {name}: {size} bytes")


def main() -> int:
    failed = False
    for m, n, k in SHAPES:
        dispatches, stock, ours = compare(m, n, k)
        limit = LIMITS[dispatches]
        failed |= ours - stock > limit
        print(
            f"{m} rows of {k}→{n}, {dispatches} dispatches: stock {stock:.1f} us, "
            f"ours {ours:.1f} us, {ours - stock:.1f} more (limit {limit:.0f})"
        )
    os.environ[selection.ENVIRONMENT] = "stock"
    dispatch.forget()
    for name, more in of_layers().items():
        failed |= more > LAYER_LIMIT
        print(f"{name}: {more:.2f} us more than stock (limit {LAYER_LIMIT})")
    times = of_model()
    failed |= times > MODEL_LIMIT
    print(f"a token of {BLOCKS} blocks: {times:.3f} times stock (limit {MODEL_LIMIT})")
    plain = import_milliseconds("import mlx.core, mlx.nn")
    whole = import_milliseconds("import mlx.core, mlx.nn, mlx_marlin")
    failed |= whole - plain > IMPORT_LIMIT
    print(
        f"import: mlx {plain:.0f} ms, with mlx_marlin {whole:.0f} ms, "
        f"{whole - plain:.0f} more (limit {IMPORT_LIMIT:.0f})"
    )
    print_text_bytes()
    return int(failed)


if __name__ == "__main__":
    assert nn  # imported so that its cost is MLX's, not ours
    sys.exit(main())
