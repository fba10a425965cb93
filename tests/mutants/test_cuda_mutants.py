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
from mutants.cuda import (
    decode,
    gather,
    mma_staged,
    pairs,
    products,
    rotated,
    rows,
    staged,
)
from mutants.detectors import REPORTS, TIME_LIMIT
from mutants.mutant import Detector, Mutant
from support import cuda_experts, cuda_on_cpu, launches
from support.cuda_cases import (
    GATED_WAYS,
    HEAD_EPSILON,
    ROTATION,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
)
from support.cuda_on_cpu import check_moved

pytestmark = [
    pytest.mark.mutant,
    pytest.mark.skipif(
        metal_emulator.unavailable() is not None,
        reason="the emulator does not run here",
    ),
]

WHOLE, SLICED, STREAM = WAYS[0], WAYS[2], WAYS[3]
CASES: dict[str, Any] = {
    products.PACKED: ("affine", 4, 64, "marlin", "float16", 12, WHOLE),
    products.ORDER: ("affine", 4, 64, "marlin", "float16", 12, WHOLE),
    products.PACKED_STREAM: ("affine", 4, 64, "marlin", "float16", 12, STREAM),
    products.NATIVE: ("affine", 4, 64, "mlx", "bfloat16", 12, WHOLE),
    products.TAIL: ("affine", 4, 32, "marlin", "float16", 9, SLICED),
    products.PAIRS: ("affine", 4, 128, "marlin", "float16", 9, SLICED),
    products.SYMMETRIC: ("symmetric", 4, 64, "marlin", "bfloat16", 9, STREAM),
    products.ZERO_POINT: ("zero_point", 3, 64, "marlin", "float16", 9, STREAM),
    products.PARTS: ("affine", 4, 64, "marlin", "float16", 9, WHOLE),
    products.NVFP4: ("nvfp4", 4, 16, "marlin", "float16", 9, STREAM),
    products.MXFP4: ("mxfp4", 4, 32, "marlin", "bfloat16", 9, WHOLE),
    pairs.GATED: ("affine", 4, 64, "marlin", "float16", *GATED_WAYS[1]),
}
MOVED = {
    products.PACKED_ODD: OPERANDS,
    products.ODD_X: ("x",),
    products.ODD_WORDS: ("w",),
    products.ODD_SCALES: ("scales",),
}
CASES |= dict.fromkeys(MOVED, ("affine", 4, 64, "marlin", "float16", 6, WHOLE))
ROTATED = Epilogue(
    bias=True,
    rotation=replace(ROTATION, per_row=True, factor=1.5),
    parts=(128, 64, 128),
)
NORMED_HEADS = Epilogue(
    rotation=Rotation(128, 512, per_row=True, norm=HEAD_EPSILON, queries=256),
    parts=(512, 128),
)
CHECKS: dict[str, Callable[[Any], None]] = {
    products.ORDER: cuda_on_cpu.check_order,
    products.PARTS: partial(cuda_on_cpu.check_parts, parts=(40, 70, 90)),
    pairs.GATED: cuda_on_cpu.check_gated,
    pairs.ROTATED: partial(
        cuda_on_cpu.check_rotated, epilogue=ROTATED, n=sum(ROTATED.parts)
    ),
    pairs.ROTATED_NORMS: partial(
        cuda_on_cpu.check_rotated, epilogue=NORMED_HEADS, n=sum(NORMED_HEADS.parts)
    ),
    rotated.ROTATED_FAR: partial(
        cuda_on_cpu.check_rotated,
        epilogue=ROTATED,
        n=sum(ROTATED.parts),
        first=1_000_000,
    ),
    decode.BATCH: cuda_on_cpu.check_batch,
    rows.NORMED: cuda_on_cpu.check_normed,
    rows.ODD_X: partial(cuda_on_cpu.check_normed, names="x"),
    rows.ODD_NORM: partial(cuda_on_cpu.check_normed, names=("norm",)),
    decode.ROWS_DECODED: partial(cuda_on_cpu.check_decoded, transposed=True),
    decode.K_DECODED: partial(cuda_on_cpu.check_decoded, transposed=False),
    decode.NATIVE_DECODED: partial(cuda_on_cpu.check_decoded, transposed=False),
    staged.INFINITE: cuda_on_cpu.check_infinite,
}
"""What compares a case with float64; a product with arrays that are moved if it has
none."""
CASES |= {
    decode.BATCH: ("affine", 4, 64, "marlin", "float16", 5, STREAM),
    decode.ROWS_DECODED: ("nvfp4", 4, 16, "marlin", "float16", 10, WHOLE),
    decode.K_DECODED: ("nvfp4", 4, 16, "marlin", "float16", 10, WHOLE),
    decode.NATIVE_DECODED: ("affine", 4, 64, "mlx", "bfloat16", 10, WHOLE),
}
WGMMA_WHOLE, WGMMA_STREAM = WGMMA_WAYS[0], WGMMA_WAYS[3]
STAGED_WHOLE, STAGED_STRIPE, STAGED_SLICED, *_ = STAGED_WAYS
RING_MOVED = {
    staged.ODD_X: ("x",),
    staged.ODD_WORDS: ("w",),
    staged.ODD_SCALES: ("scales",),
}
MOVED |= RING_MOVED
CASES |= {
    staged.WHOLE: ("affine", 4, 64, "marlin", "float16", 12, WGMMA_WHOLE),
    staged.STREAM: ("affine", 4, 64, "marlin", "bfloat16", 20, WGMMA_STREAM),
    staged.SLICED: ("affine", 4, 64, "marlin", "float16", 12, WGMMA_WAYS[2]),
    staged.HALVES: ("affine", 4, 128, "marlin", "float16", 40, WGMMA_STREAM),
    staged.MANY_WARPS: ("affine", 4, 64, "marlin", "float16", 12, WGMMA_WAYS[5]),
    staged.TAIL: ("affine", 4, 32, "marlin", "float16", 20, WGMMA_WHOLE),
    staged.INFINITE: ("affine", 4, 32, "marlin", "float16", 20, WGMMA_WHOLE),
}
CASES |= dict.fromkeys(
    RING_MOVED, ("affine", 4, 64, "marlin", "float16", 12, WGMMA_WHOLE)
)
CASES |= {
    mma_staged.WHOLE: ("affine", 4, 64, "marlin", "float16", 12, STAGED_WHOLE),
    mma_staged.ODD: ("affine", 4, 64, "marlin", "bfloat16", 20, STAGED_WHOLE),
    mma_staged.FOUR: ("affine", 4, 64, "marlin", "float16", 30, STAGED_WHOLE),
    mma_staged.SLICED: ("affine", 4, 64, "marlin", "float16", 9, STAGED_SLICED),
    mma_staged.PAIRS: ("affine", 4, 128, "marlin", "float16", 9, STAGED_WHOLE),
    mma_staged.LONG: ("affine", 4, 256, "marlin", "float16", 9, STAGED_STRIPE),
}
ROWS_WAY = {"strategy": "data_parallel", "simdgroups_n": 5, "simdgroups_k": 1}
CASES[pairs.ROTATED_NORMS] = (
    "affine",
    4,
    64,
    "marlin",
    "float16",
    3,
    GATED_WAYS[1][1] | {"simdgroups_n": 8},
)
CASES |= dict.fromkeys(
    (pairs.ROTATED, rotated.ROTATED_FAR),
    ("affine", 4, 64, "marlin", "float16", *GATED_WAYS[1]),
)
CASES |= dict.fromkeys(
    (rows.NORMED, rows.ODD_X, rows.ODD_NORM),
    ("affine", 4, 64, "marlin", "float16", 2, ROWS_WAY),
)
OF_EXPERTS = {
    gather.EXPERTS: cuda_experts.CALLS["blocks of experts"],
    gather.PAIRS: cuda_experts.CALLS["blocks of pairs"],
    gather.GATED: cuda_experts.CALLS["gate and up"],
    gather.BIASED: cuda_experts.CALLS["biases"],
    gather.CLIPPED: cuda_experts.CALLS["gate and up with biases, both clipped"],
}
CASES |= {name: call.case for name, call in OF_EXPERTS.items()}
CHECKS |= {name: lambda _, call=call: call.check() for name, call in OF_EXPERTS.items()}
CASES |= {
    gather.CHOSEN: cuda_experts.ROUTINGS[0],
    gather.CHOSEN_OF_ALL: cuda_experts.ROUTINGS[1],
    gather.CHOSEN_FEW: cuda_experts.ROUTINGS[3],
    gather.CHOSEN_SPECIAL: cuda_experts.SPECIAL_ROUTINGS[0],
    gather.ADDED_UP: cuda_experts.ROUTINGS[1],
}
CHECKS |= {
    gather.CHOSEN: lambda choice: choice.check(launches.route),
    gather.CHOSEN_OF_ALL: lambda choice: choice.check(launches.route),
    gather.CHOSEN_FEW: lambda choice: choice.check(launches.route),
    gather.CHOSEN_SPECIAL: lambda choice: choice.check(launches.route),
    gather.ADDED_UP: lambda choice: choice.check_sum(launches.combine),
}


@pytest.fixture
def plant(
    backend: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
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
            judge = CHECKS.get(case, partial(check_moved, names=MOVED.get(case, ())))
            judge(CASES[case])
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
