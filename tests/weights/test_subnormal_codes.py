"""Decoding of small floats does not depend on subnormal halves.

E2M1's 0.5 and E4M3's smallest values are subnormal halves until they are multiplied by
a power of two. Apple's compiler may convert such a half to a float that is 0, so the
factor has to come first. The emulator converts exactly. Here the shaders' own text is
compiled with conversions that flush, and every bit of the results stays the same.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_marlin.backends import graph, source
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.plan import Plan
from support import format_cases, launches, planted_text
from support.format_cases import Variant
from support.profiles import sampled
from support.trace_mode import emulator_only

pytestmark = emulator_only

FLUSHING = """
template <typename A>
METAL_FUNC A flush(A value) {
  return value;
}
METAL_FUNC half flush(half value) {
  return abs(float(value)) < 0x1p-14f ? half(0.0f) : value;
}
METAL_FUNC half2 flush(half2 v) {
  return half2(flush(v.x), flush(v.y));
}
METAL_FUNC half4 flush(half4 v) {
  return half4(flush(v.x), flush(v.y), flush(v.z), flush(v.w));
}
template <typename To>
struct Converted {
  template <typename... From>
  static METAL_FUNC To from(From... values) {
    return To(flush(values)...);
  }
};
template <typename To>
struct Kept {
  template <typename... From>
  static METAL_FUNC To from(From... values) {
    return To(values...);
  }
};
template <>
struct Converted<half> : Kept<half> {};
template <>
struct Converted<half2> : Kept<half2> {};
template <>
struct Converted<half4> : Kept<half4> {};
"""
"""Conversions to any type but half."""
CONVERSION = re.compile(r"(?<![\w:<])(float[24]?|V|vec<[VF], [24]>|Run)\(")
FACTOR_FIRST = "vec<V, 2>(halves * half(W::FACTOR))"
FACTOR_LAST = "vec<V, 2>(halves) * V(W::FACTOR)"
N, K = 41, 320


@pytest.fixture
def flushing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Returns what makes all conversions flush, after a replacement in the shaders."""

    def put(old: str = "", new: str = "") -> None:
        folder = tmp_path / "shaders"
        shutil.copytree(source.shader_folder(), folder)
        for file in (folder / "lib").iterdir():
            text = file.read_text(encoding="ascii").replace(old, new)
            file.write_text(CONVERSION.sub(r"Converted<\1>::from(", text))
        first = folder / "lib" / f"{metal_source.WEIGHT[0]}.metal"
        first.write_text(FLUSHING + first.read_text(encoding="ascii"))
        planted_text.plant(folder, monkeypatch)

    planted_text.forget_texts()
    yield put
    monkeypatch.undo()
    planted_text.forget_texts()


def activations(m: int, dtype: str) -> mx.array:
    """Makes rows without subnormal numbers."""
    x = format_cases.activations(m, K, dtype="float32", seed=2)
    return (mx.round(8 * x) / 8).astype(getattr(mx, dtype))


def variant(
    mode: str, bits: int, group_size: int, layout: str, dtype: str, fragments: int
) -> Variant:
    return Variant(
        mode, bits, group_size, layout, dtype, "uint8", fragments, "exact", False
    )


VARIANTS = [
    variant("mxfp4", 4, 32, "marlin", "float16", 0),
    variant("mxfp8", 8, 32, "mlx", "bfloat16", 0),
    variant("nvfp4", 4, 16, "mlx", "float16", 0),
    variant("mxfp4", 4, 32, "mlx", "float16", 1),
    variant("mxfp8", 8, 32, "marlin", "float32", 1),
    variant("nvfp4", 4, 16, "marlin", "float16", 1),
    variant("nvfp4", 4, 16, "mlx", "float32", 1),
]


def product(variant: Variant, **changes: object) -> mx.array:
    m = 11 if variant.fragments else 1
    plan: Plan = replace(variant.plan(m, N, K), **changes)
    x = activations(m, variant.dtype)
    return format_cases.run(plan, x, variant.weight(N, K, seed=1))


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))


def plain_numbers(layout: str) -> mx.array:
    of_layout = replace(VARIANTS[-1], layout=layout)
    plan = dequantize_plan(of_layout.problem(1, N, K))
    arrays = format_cases.arguments(of_layout.weight(N, K, seed=1), layout)
    return launches.dequantized(plan)(*arrays)


def experts() -> mx.array:
    """Multiplies one row by dot products and five by matrices."""
    of_one = VARIANTS[2]
    plan = MetalGatherPlan(
        gather=GatherProblem(problem=of_one.problem(6, N, K), experts=2),
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=2,
        dot_rows=1,
        operand="exact",
    )
    weight = of_one.weight(2 * N, K, seed=1)
    words, scales = (each.reshape(2, N, -1) for each in weight.native)
    pairs = mx.array([0, 1, 1, 1, 1, 1], mx.uint32), mx.arange(6, dtype=mx.uint32)
    x = activations(6, of_one.dtype)
    return graph.gather_product(plan)(x, words, scales, scales, *pairs)


@sampled(3, 11)
@pytest.mark.parametrize(
    "run",
    [
        *(partial(product, variant) for variant in VARIANTS[:5:2]),
        *(
            pytest.param(partial(product, variant), marks=pytest.mark.slow)
            for variant in (*VARIANTS[1::2], VARIANTS[-1])
        ),
        pytest.param(partial(plain_numbers, "mlx"), marks=pytest.mark.slow),
        partial(plain_numbers, "marlin"),
        partial(product, VARIANTS[-2], kernel="gemm_staged", buffers=1),
        experts,
    ],
)
def test_results_keep_their_bits(
    run: Callable[[], mx.array], flushing: Callable[..., None]
) -> None:
    expected = run()
    flushing()
    assert same_bits(run(), expected)


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[-1]], ids=str)
def test_a_factor_after_the_conversion_loses_small_values(
    variant: Variant, flushing: Callable[..., None]
) -> None:
    expected = product(variant)
    flushing(FACTOR_FIRST, FACTOR_LAST)
    assert not same_bits(product(variant), expected)
