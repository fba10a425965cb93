"""Our shaders pass the static check: what is chosen, and every pair of values."""

from collections.abc import Sequence
from itertools import product

import pytest

from mlx_marlin import emulator
from mlx_marlin.weights.formats import CODES, FORMATS
from support.shader_variants import (
    EPILOGUES,
    Variant,
    checked,
    chosen_variants,
    covering_variants,
    every_variant,
    ordinary_variants,
)

pytestmark = pytest.mark.skipif(
    emulator.unavailable() is not None, reason="no compiler for Metal kernels"
)

KERNELS = (
    "marlin_gemv",
    "marlin_gemv_fused",
    "marlin_gemv_atomic",
    "marlin_gemm_register",
    "marlin_gemm_register_fused",
    "marlin_gemm_register_atomic",
    "marlin_gemm_staged",
    "marlin_gemm_staged_fused",
    "marlin_gemm_staged_atomic",
    "marlin_reduce",
    "marlin_reduce_fused",
    "marlin_dequantize",
    "marlin_gather",
    "marlin_pack",
    "marlin_unpack",
)
MOST = 320
"""Instances that an ordinary run checks."""


def of_kernel(kernel: str, variants: Sequence[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.source.name == kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_chosen_instance_and_pair_of_values_passes(
    kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = of_kernel(kernel, covering_variants())

    checked(variants)

    with capsys.disabled():
        print(f"\nstatic check: {len(variants)} instances of {kernel}")


def test_an_ordinary_run_checks_no_more_than_it_may() -> None:
    covering = covering_variants()

    assert {*chosen_variants()} <= {*covering}
    assert len(covering) <= MOST
    assert len(set(covering)) == len(covering)
    assert {variant.source.name for variant in covering} == {*KERNELS}


@pytest.mark.grid
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


@pytest.mark.grid
def test_the_covering_set_leaves_no_pair_out() -> None:
    def met(variants: Sequence[Variant]) -> set[object]:
        return {(each.kernel, pair) for each in variants for pair in each.pairs}

    every = met(ordinary_variants())
    assert met(covering_variants()) == every
    assert met(covering_variants()[:-1]) != every


@pytest.mark.grid
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instance_passes(kernel: str) -> None:
    variants = of_kernel(kernel, every_variant())
    for start in range(0, len(variants), MOST):
        checked(variants[start : start + MOST])
