"""Our shaders pass the static check: what is chosen, and every pair of values."""

from collections.abc import Sequence

import pytest
from shader_variants import Variant, checked, covering_variants, every_variant, pairwise

from mlx_marlin import emulator

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
    "marlin_reduce",
    "marlin_reduce_fused",
)
MOST = 300
"""Instances that an ordinary run checks."""

COVERING = covering_variants()


def of_kernel(kernel: str, variants: Sequence[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.source.name == kernel]


@pytest.mark.parametrize(
    ("kernel", "count"),
    [(kernel, len(of_kernel(kernel, COVERING))) for kernel in KERNELS],
)
def test_every_chosen_instance_and_pair_of_values_passes(
    kernel: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    checked(of_kernel(kernel, COVERING))

    with capsys.disabled():
        print(f"\nstatic check: {count} instances of {kernel}")


def test_an_ordinary_run_checks_no_more_than_it_may() -> None:
    assert len(COVERING) <= MOST
    assert len(set(COVERING)) == len(COVERING)
    assert {variant.source.name for variant in COVERING} == {*KERNELS}


def test_every_epilogue_meets_every_value_of_a_body() -> None:
    for kernel in ("marlin_gemv_fused", "marlin_gemm_register_fused"):
        found = [dict(each.values) for each in of_kernel(kernel, every_variant())]
        flags = ("BIAS", "ACTIVATION", "MULTIPLY", "RESIDUAL")
        for name in {*found[0]} - {*flags}:
            epilogues = {
                value: {
                    tuple(each[flag] for flag in flags)
                    for each in found
                    if each[name] == value
                }
                for value in {each[name] for each in found}
            }
            assert {*map(len, epilogues.values())} == {31}, name


def test_the_covering_set_leaves_no_pair_out() -> None:
    assert pairwise(every_variant(), COVERING) == []
    assert pairwise(every_variant(), COVERING[:-1]) != []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instance_passes(kernel: str) -> None:
    variants = of_kernel(kernel, every_variant())
    for start in range(0, len(variants), MOST):
        checked(variants[start : start + MOST])
