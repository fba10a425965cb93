"""Our shaders pass the static check: what is chosen, and every pair of values."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from mlx_marlin.backends import kernels
from mlx_marlin.backends.metal import kernel_limits
from mlx_marlin.backends.metal.source import BODIES
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.weights.formats import CODES, FORMATS
from support import launches
from support.marks import needs_emulator
from support.profiles import sampled
from support.shader_variants import (
    EPILOGUES,
    OLDEST,
    Variant,
    checked,
    chosen_variants,
    covering_variants,
    every_variant,
    ordinary_variants,
)

pytestmark = needs_emulator

NO_PRODUCTS = {
    *("add_norm", "combine", "rotate_heads", "route"),
    *("operand_probe", "tensor_layout", "tensor_probe"),
}
"""Bodies of which there are no instances to choose from."""
KERNELS = [
    *(f"marlin_{body}" for body in BODIES if body not in NO_PRODUCTS),
    *(f"marlin_{kernel}_atomic" for kernel in kernel_limits.KERNELS),
]
MOST = 450
"""Instances that an ordinary run checks."""


MLX = json.loads((Path(__file__).parents[1] / "data" / "mlx_builtins.json").read_text())
IN_MLX = "they meet in MLX's own kernels, which Apple compiles"
OPERANDS = {
    ("float", "half", "half", "float"): IN_MLX,
    ("float", "bfloat", "bfloat", "float"): IN_MLX,
    ("float", "float", "float", "float"): IN_MLX,
    ("float", "half", "float", "float"): "MLX ships it with the operands exchanged; "
    "the guard computes known answers of every lane, and exact codes serve otherwise",
}
"""Types of the sum, both operands and the addend of a product: why ours may meet."""


def test_matrices_meet_in_types_that_meet_in_mlx_or_were_reviewed() -> None:
    shipped = {*map(tuple, MLX["multiply_accumulate"])}

    assert {each for each in OPERANDS if OPERANDS[each] == IN_MLX} == (
        OPERANDS.keys() & shipped
    )


def of_kernel(kernel: str, variants: Sequence[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.source.name == kernel]


@sampled(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_chosen_instance_and_pair_of_values_passes(
    kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = of_kernel(kernel, covering_variants())

    operands = checked(variants)

    assert operands <= OPERANDS.keys()
    assert kernel != "marlin_gemm_register" or operands == OPERANDS.keys()
    with capsys.disabled():
        print(f"\nstatic check: {len(variants)} instances of {kernel}")


@pytest.mark.parametrize("kernel", ["marlin_reduce", "marlin_gemm_tensor"])
def test_a_word_of_a_newer_language_than_mlx_takes_is_refused(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = of_kernel(kernel, covering_variants())[0]
    text = variant.source
    order = "metal::mem_flags::mem_device, metal::memory_order_seq_cst"
    planted = f"metal::atomic_thread_fence({order});\n"
    newer = replace(text, source=text.source + planted)
    monkeypatch.setattr(Variant, "source", newer)

    if kernel == "marlin_gemm_tensor":  # only macOS 26.2 and later run it
        checked([variant])
        return
    with pytest.raises(
        metal_emulator.CompileError, match=r"macOS 14\.0 compiles Metal 3\.1"
    ):
        checked([variant])


def test_an_ordinary_run_checks_no_more_than_it_may() -> None:
    covering = covering_variants()

    assert {*chosen_variants()} <= {*covering}
    assert len(covering) <= MOST
    assert len(set(covering)) == len(covering)
    assert {variant.source.name for variant in covering} == {*KERNELS}


DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def rotations() -> None:
    """Few positions are in constant memory, others in device memory."""
    for dtype, norm, first in product(DTYPES, (None, 1e-6), ([3], [*range(9)])):
        layout = Heads(heads=4, kv_heads=2, features=66, columns=528, norm=norm)
        norms = () if norm is None else (mx.ones(66, dtype), mx.ones(66, dtype))
        qkv = mx.zeros((9, 2, 528), dtype)
        launches.rotate_heads(layout, qkv, mx.array(first), mx.ones(33), norms)


def sums() -> None:
    """A row of one simdgroup, and of several."""
    for dtype, n in product(DTYPES, (40, 4099)):
        x = mx.zeros((2, n), dtype)
        launches.add_norm(x, x, x[0], 1e-5)


def choices() -> None:
    """Few scores are in constant memory, others in device memory."""
    for dtype, of_all, last in product(DTYPES, (False, True), (False, True)):
        launches.route(mx.zeros((2, 70), dtype), 5, of_all, last)


def sums_of_experts() -> None:
    """Likewise."""
    for dtype, rows in product(DTYPES, (1, 4)):
        x, scores = mx.zeros((rows, 40), dtype), mx.ones((rows, 3))
        launches.combine(mx.zeros((rows, 3, 1, 40), dtype), scores, x)


@pytest.mark.parametrize("calls", [rotations, sums, choices, sums_of_experts])
def test_kernels_that_are_no_products_pass(
    calls: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[Source] = []
    found: list[dict[str, Any]] = []

    def kernel(text: Source) -> Callable[..., Any]:
        def call(**arguments: Any) -> list[mx.array]:
            texts.append(text)
            found.append(arguments)
            return [mx.zeros(shape) for shape in arguments["output_shapes"]]

        return call

    monkeypatch.setattr(kernels, "kernel", kernel)
    calls()
    (text,) = set(texts)
    names = text.name, text.input_names, text.output_names
    metal_emulator.check(*names, text.source, text.header, calls=found, macos=OLDEST)


@pytest.mark.slow
def test_every_flag_of_an_epilogue_meets_every_value_of_a_body() -> None:
    flags = ("BIAS", "ACTIVATION", "MULTIPLY", "RESIDUAL", "PARTS")
    for kernel in ("marlin_gemv_fused", "marlin_gemm_register_fused"):
        found = [dict(each.values) for each in of_kernel(kernel, ordinary_variants())]
        known = ("MODE", "BITS", "GROUP")
        found = [each for each in found if [each[v] for v in known] == [0, 4, 64]]
        epilogues = {tuple(each[flag] for flag in flags) for each in found}
        assert len(epilogues) == len(EPILOGUES)
        for name, flag in product({*found[0]} - {*flags}, flags):
            met: dict[object, set[object]] = {}
            for each in found:
                met.setdefault(each[name], set()).add(each[flag])
            if (name, flag) == ("BATCHED", "PARTS"):  # of one weight
                assert met.pop(True) == {1}
            whole = {each[flag] for each in found}
            assert all(values == whole for values in met.values()), (name, flag)


@pytest.mark.slow
def test_the_covering_set_leaves_no_pair_out() -> None:
    def met(variants: Sequence[Variant]) -> set[object]:
        return {(each.kernel, pair) for each in variants for pair in each.pairs}

    every = met(ordinary_variants())
    assert met(covering_variants()) == every
    assert met(covering_variants()[:-1]) != every


@pytest.mark.slow
def test_every_format_is_among_them() -> None:
    def formats(variants: Sequence[Variant]) -> set[tuple[object, ...]]:
        names = ("MODE", "BITS", "GROUP", "PACKED")
        found = (dict(each.values) for each in variants)
        return {tuple(each[name] for name in names) for each in found}

    expected = {
        (CODES.index(known.codes), known.bits, group_size, layout == "marlin")
        for known in FORMATS.values()
        for layout in known.layouts
        for group_size in known.group_sizes_in(layout)
    }
    expected |= {(len(CODES), 4, 16, packed) for packed in (False, True)}  # global
    products = ("marlin_gemv", "marlin_gemm_register", "marlin_gemm_staged")
    for kernel in (*products, "marlin_dequantize"):
        assert formats(of_kernel(kernel, every_variant())) == expected


@sampled(0, 0)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instance_passes(kernel: str) -> None:
    variants = of_kernel(kernel, every_variant())
    for start in range(0, len(variants), MOST):
        checked(variants[start : start + MOST])
