"""Bugs planted in the CUDA kernels are noticed, on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import metal_emulator
from mlx_marlin.backends.source import OPERANDS
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mutants.catalogue import CUDA_MUTANTS
from mutants.detectors import REPORTS, TIME_LIMIT
from mutants.mutant import Detector, Mutant
from support import cuda_experts, cuda_on_cpu, launches
from support.choose import Choose
from support.cuda_cases import (
    GATED_WAYS,
    HEAD_EPSILON,
    ROTATION,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
    Case,
)
from support.cuda_on_cpu import check_moved
from support.marks import needs_emulator

pytestmark = [pytest.mark.mutant, needs_emulator]

WHOLE, SLICED, STREAM = WAYS[0], WAYS[2], WAYS[3]
WGMMA_WHOLE, WGMMA_SLICED, WGMMA_STREAM = WGMMA_WAYS[0], WGMMA_WAYS[2], WGMMA_WAYS[3]
STAGED_WHOLE, STAGED_STRIPE, STAGED_SLICED, *_ = STAGED_WAYS
ROWS_WAY = {"strategy": "data_parallel", "simdgroups_n": 5, "simdgroups_k": 1}


def packed(
    m: int,
    way: dict[str, Any],
    group_size: int = 64,
    mode: str = "affine",
    bits: int = 4,
    dtype: str = "float16",
) -> Case:
    return (mode, bits, group_size, "marlin", dtype, m, way)


NATIVE = ("affine", 4, 64, "mlx", "bfloat16")
NVFP4 = packed(10, WHOLE, 16, "nvfp4")
PAIRED = packed(*GATED_WAYS[1])
PRODUCTS = {
    "packed, two tiles side by side, three slices, whole k": packed(12, WHOLE),
    "packed, streams, four slices": packed(12, STREAM),
    "native bfloat16, two tiles side by side, three slices, whole k": (
        *NATIVE,
        12,
        WHOLE,
    ),
    "packed groups of 32, k tail": packed(9, SLICED, 32),
    "packed groups of 128, slices": packed(9, SLICED, 128),
    "packed symmetric codes, bfloat16": packed(
        9, STREAM, mode="symmetric", dtype="bfloat16"
    ),
    "packed zero points of 3 bits": packed(9, STREAM, mode="zero_point", bits=3),
    "packed nvfp4": packed(9, STREAM, 16, "nvfp4"),
    "packed mxfp4, bfloat16": packed(9, WHOLE, 32, "mxfp4", dtype="bfloat16"),
    "wgmma, two slices, whole k": packed(12, WGMMA_WHOLE),
    "wgmma, streams, two slices": packed(20, WGMMA_STREAM, dtype="bfloat16"),
    "wgmma, k cut inside a stage": packed(12, WGMMA_SLICED),
    "wgmma, loaders bring half stages": packed(40, WGMMA_STREAM, 128),
    "wgmma, two warpgroups side by side, two slices, whole k": packed(
        12, WGMMA_WAYS[5]
    ),
    "wgmma, groups of 32, k tail": packed(20, WGMMA_WHOLE, 32),
    "mma_staged, two slices, whole k": packed(12, STAGED_WHOLE),
    "mma_staged, three fragments, two slices, whole k": packed(
        20, STAGED_WHOLE, dtype="bfloat16"
    ),
    "mma_staged, four fragments": packed(30, STAGED_WHOLE),
    "mma_staged, k cut inside a stage": packed(9, STAGED_SLICED),
    "mma_staged, groups of 128": packed(9, STAGED_WHOLE, 128),
    "mma_staged, groups of 256, one slice": packed(9, STAGED_STRIPE, 256),
}
MOVED = {
    "packed, odd offsets": (packed(6, WHOLE), OPERANDS),
    "packed, odd offset of x": (packed(6, WHOLE), ("x",)),
    "packed, odd offset of words": (packed(6, WHOLE), ("w",)),
    "packed, odd offset of scales": (packed(6, WHOLE), ("scales",)),
    "wgmma, odd offset of x": (packed(12, WGMMA_WHOLE), ("x",)),
    "wgmma, odd offset of words": (packed(12, WGMMA_WHOLE), ("w",)),
    "wgmma, odd offset of scales": (packed(12, WGMMA_WHOLE), ("scales",)),
}
"""Products of arrays some of which begin an element after their buffers do."""
ROTATED = Epilogue(
    bias=True,
    rotation=replace(ROTATION, per_row=True, factor=1.5),
    parts=(128, 64, 128),
)
NORMED_HEADS = Epilogue(
    rotation=Rotation(128, 512, per_row=True, norm=HEAD_EPSILON, queries=256),
    parts=(512, 128),
)
check_rotated = partial(
    cuda_on_cpu.check_rotated, PAIRED, epilogue=ROTATED, n=sum(ROTATED.parts)
)
check_normed = partial(cuda_on_cpu.check_normed, packed(2, ROWS_WAY))
CASES: dict[str, Callable[[], None]] = {
    **{name: partial(cuda_on_cpu.check, case) for name, case in PRODUCTS.items()},
    **{name: partial(check_moved, *case) for name, case in MOVED.items()},
    "packed, numbers that cancel, three slices": partial(
        cuda_on_cpu.check_order, packed(12, WHOLE)
    ),
    "packed, three results": partial(
        cuda_on_cpu.check_parts, packed(9, WHOLE), parts=(40, 70, 90)
    ),
    "packed, gate and up, two slices": partial(cuda_on_cpu.check_gated, PAIRED),
    "packed, rotated heads, two slices": check_rotated,
    "packed, rotated heads at places of a million": partial(
        check_rotated, first=1_000_000
    ),
    "packed, rotated heads with norms, two slices": partial(
        cuda_on_cpu.check_rotated,
        packed(3, GATED_WAYS[1][1] | {"simdgroups_n": 8}),
        epilogue=NORMED_HEADS,
        n=sum(NORMED_HEADS.parts),
    ),
    "packed batch, streams": partial(cuda_on_cpu.check_batch, packed(5, STREAM)),
    "packed, normalized rows, three warps a row and two": check_normed,
    "packed, normalized rows, odd offset of x": partial(check_normed, names="x"),
    "packed, normalized rows, odd offset of the norm's weight": partial(
        check_normed, names=("norm",)
    ),
    "nvfp4 with a global scale, rows decoded in blocks": partial(
        cuda_on_cpu.check_decoded, NVFP4, transposed=True
    ),
    "nvfp4 with a global scale, k decoded in blocks": partial(
        cuda_on_cpu.check_decoded, NVFP4, transposed=False
    ),
    "native bfloat16, decoded in blocks of k": partial(
        cuda_on_cpu.check_decoded, (*NATIVE, 10, WHOLE), transposed=False
    ),
    "wgmma, groups of 32, k tail, x ends in an infinity": partial(
        cuda_on_cpu.check_infinite, packed(20, WGMMA_WHOLE, 32)
    ),
    **{
        f"experts, {name}": cuda_experts.CALLS[name].check
        for name in (
            *("blocks of experts", "blocks of pairs", "gate and up", "biases"),
            "gate and up with biases, both clipped",
        )
    },
    **{
        f"experts, {name}": partial(choice.check, launches.route)
        for name, choice in {
            "chosen": cuda_experts.ROUTINGS[0],
            "chosen with scores of all": cuda_experts.ROUTINGS[1],
            "chosen of few": cuda_experts.ROUTINGS[3],
            "chosen where logits are no numbers": cuda_experts.SPECIAL_ROUTINGS[0],
        }.items()
    },
    "experts, added up": partial(cuda_experts.ROUTINGS[1].check_sum, launches.combine),
}
"""What compares a case with float64, and raises an AssertionError."""


@pytest.fixture
def plant(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mutant | None], None]:
    """Returns what serves calls by the CUDA kernels, with a bug or without."""

    def put(mutant: Mutant | None) -> None:
        changes = {Path(mutant.file).name: mutant.changed} if mutant else {}
        cuda_on_cpu.serve(monkeypatch, changes)
        backend("cuda")

    return put


def detect(detector: Detector, case: str) -> str | None:
    """Asks one detector about the kernels as they are now."""
    try:
        with metal_emulator.emulated(
            workers=1, trace=detector in REPORTS, time_limit=TIME_LIMIT
        ):
            CASES[case]()
    except AssertionError:
        return "wrong" if detector == Detector.WRONG_RESULT else None
    except metal_emulator.EmulatorError as error:
        first_line, *_ = str(error).splitlines()
        if any(sentence in first_line for sentence in REPORTS.get(detector, ())):
            return str(error)
        raise
    return None


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.name) for each in CUDA_MUTANTS]
)
def test_a_planted_bug_is_noticed(
    mutant: Mutant,
    plant: Callable[[Mutant | None], None],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("mutant", f"{mutant.file}: {mutant.name}")
    record_property("caught_by", str(mutant.caught_by))
    plant(mutant)

    assert detect(mutant.caught_by, mutant.case)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_said_of_our_own_kernels(
    case: str, plant: Callable[[Mutant | None], None]
) -> None:
    plant(None)

    assert detect(Detector.WRONG_RESULT, case) is None
    assert detect(Detector.RACE, case) is None


def test_every_case_is_needed() -> None:
    assert {mutant.case for mutant in CUDA_MUTANTS} == set(CASES)
