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
    EPSILON,
    GATED,
    GATED_N,
    GATED_WAYS,
    HEAD_EPSILON,
    ROTATION,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
)
from support.cuda_on_cpu import check
from support.marks import needs_emulator

pytestmark = [pytest.mark.mutant, needs_emulator]

PACKED = ("affine", 4, 64, "marlin", "float16")
WHOLE, SLICED, STREAM = WAYS[0], WAYS[2], WAYS[3]
CASES: dict[str, Any] = {
    "packed, two tiles side by side, three slices, whole k": (*PACKED, 12, WHOLE),
    "packed, numbers that cancel, three slices": (*PACKED, 12, WHOLE),
    "packed, streams, four slices": (*PACKED, 12, STREAM),
    "native bfloat16, two tiles side by side, three slices, whole k": (
        "affine",
        4,
        64,
        "mlx",
        "bfloat16",
        12,
        WHOLE,
    ),
    "packed groups of 32, k tail": ("affine", 4, 32, "marlin", "float16", 9, SLICED),
    "packed groups of 128, slices": ("affine", 4, 128, "marlin", "float16", 9, SLICED),
    "packed symmetric codes, bfloat16": (
        "symmetric",
        4,
        64,
        "marlin",
        "bfloat16",
        9,
        STREAM,
    ),
    "packed zero points of 3 bits": (
        "zero_point",
        3,
        64,
        "marlin",
        "float16",
        9,
        STREAM,
    ),
    "packed, three results": (*PACKED, 9, WHOLE),
    "packed nvfp4": ("nvfp4", 4, 16, "marlin", "float16", 9, STREAM),
    "packed mxfp4, bfloat16": ("mxfp4", 4, 32, "marlin", "bfloat16", 9, WHOLE),
    "packed, gate and up, two slices": (*PACKED, *GATED_WAYS[1]),
}
MOVED = {
    "packed, odd offsets": OPERANDS,
    "packed, odd offset of x": ("x",),
    "packed, odd offset of words": ("w",),
    "packed, odd offset of scales": ("scales",),
}
CASES |= dict.fromkeys(MOVED, (*PACKED, 6, WHOLE))
ROTATED = Epilogue(
    bias=True,
    rotation=replace(ROTATION, per_row=True, factor=1.5),
    parts=(128, 64, 128),
)
NORMED_HEADS = Epilogue(
    rotation=Rotation(128, 512, per_row=True, norm=HEAD_EPSILON, queries=256),
    parts=(512, 128),
)
CHECKS: dict[str, Callable[[Any], object]] = {
    "packed, numbers that cancel, three slices": cuda_on_cpu.check_order,
    "packed, three results": partial(check, epilogue=Epilogue(parts=(40, 70, 90))),
    "packed, gate and up, two slices": partial(check, epilogue=GATED, n=GATED_N),
    "packed, rotated heads, two slices": partial(
        check, epilogue=ROTATED, n=sum(ROTATED.parts)
    ),
    "packed, rotated heads with norms, two slices": partial(
        check, epilogue=NORMED_HEADS, n=sum(NORMED_HEADS.parts)
    ),
    "packed, rotated heads at places of a million": partial(
        check,
        epilogue=ROTATED,
        n=sum(ROTATED.parts),
        first=1_000_000,
    ),
    "packed batch, streams": partial(check, batch=3),
    "packed, normalized rows, three warps a row and two": partial(check, norm=EPSILON),
    "packed, normalized rows, odd offset of x": partial(check, norm=EPSILON, names="x"),
    "packed, normalized rows, odd offset of the norm's weight": partial(
        check, norm=EPSILON, names=("norm",)
    ),
    "nvfp4 with a global scale, rows decoded in blocks": partial(
        cuda_on_cpu.check_decoded, transposed=True
    ),
    "nvfp4 with a global scale, k decoded in blocks": partial(
        cuda_on_cpu.check_decoded, transposed=False
    ),
    "native bfloat16, decoded in blocks of k": partial(
        cuda_on_cpu.check_decoded, transposed=False
    ),
    "groups of 32, decoded in blocks of k": partial(
        cuda_on_cpu.check_decoded, transposed=False
    ),
    "wgmma, groups of 32, k tail, x ends in an infinity": cuda_on_cpu.check_infinite,
}
"""What compares a case with float64; a product with arrays that are moved if it has
none."""
CASES |= {
    "packed batch, streams": (*PACKED, 5, STREAM),
    "nvfp4 with a global scale, rows decoded in blocks": (
        "nvfp4",
        4,
        16,
        "marlin",
        "float16",
        10,
        WHOLE,
    ),
    "nvfp4 with a global scale, k decoded in blocks": (
        "nvfp4",
        4,
        16,
        "marlin",
        "float16",
        10,
        WHOLE,
    ),
    "native bfloat16, decoded in blocks of k": (
        "affine",
        4,
        64,
        "mlx",
        "bfloat16",
        10,
        WHOLE,
    ),
    "groups of 32, decoded in blocks of k": (
        "affine",
        4,
        32,
        "marlin",
        "float16",
        10,
        WHOLE,
    ),
}
WGMMA_WHOLE, WGMMA_STREAM = WGMMA_WAYS[0], WGMMA_WAYS[3]
STAGED_WHOLE, STAGED_STRIPE, STAGED_SLICED, *_ = STAGED_WAYS
RING_MOVED = {
    "wgmma, odd offset of x": ("x",),
    "wgmma, odd offset of words": ("w",),
    "wgmma, odd offset of scales": ("scales",),
}
MOVED |= RING_MOVED
CASES |= {
    "wgmma, two slices, whole k": (*PACKED, 12, WGMMA_WHOLE),
    "wgmma, streams, two slices": (
        "affine",
        4,
        64,
        "marlin",
        "bfloat16",
        20,
        WGMMA_STREAM,
    ),
    "wgmma, k cut inside a stage": (*PACKED, 12, WGMMA_WAYS[2]),
    "wgmma, loaders bring half stages": (
        "affine",
        4,
        128,
        "marlin",
        "float16",
        40,
        WGMMA_STREAM,
    ),
    "wgmma, two warpgroups side by side, two slices, whole k": (
        *PACKED,
        12,
        WGMMA_WAYS[5],
    ),
    "wgmma, groups of 32, k tail": (
        "affine",
        4,
        32,
        "marlin",
        "float16",
        20,
        WGMMA_WHOLE,
    ),
    "wgmma, groups of 32, k tail, x ends in an infinity": (
        "affine",
        4,
        32,
        "marlin",
        "float16",
        20,
        WGMMA_WHOLE,
    ),
}
CASES |= dict.fromkeys(RING_MOVED, (*PACKED, 12, WGMMA_WHOLE))
CASES |= {
    "mma_staged, two slices, whole k": (*PACKED, 12, STAGED_WHOLE),
    "mma_staged, three fragments, two slices, whole k": (
        "affine",
        4,
        64,
        "marlin",
        "bfloat16",
        20,
        STAGED_WHOLE,
    ),
    "mma_staged, four fragments": (*PACKED, 30, STAGED_WHOLE),
    "mma_staged, k cut inside a stage": (*PACKED, 9, STAGED_SLICED),
    "mma_staged, groups of 128": (
        "affine",
        4,
        128,
        "marlin",
        "float16",
        9,
        STAGED_WHOLE,
    ),
    "mma_staged, groups of 256, one slice": (
        "affine",
        4,
        256,
        "marlin",
        "float16",
        9,
        STAGED_STRIPE,
    ),
}
ROWS_WAY = {"strategy": "data_parallel", "simdgroups_n": 5, "simdgroups_k": 1}
CASES["packed, rotated heads with norms, two slices"] = (
    *PACKED,
    3,
    GATED_WAYS[1][1] | {"simdgroups_n": 8},
)
CASES |= dict.fromkeys(
    (
        "packed, rotated heads, two slices",
        "packed, rotated heads at places of a million",
    ),
    (*PACKED, *GATED_WAYS[1]),
)
CASES |= dict.fromkeys(
    (
        "packed, normalized rows, three warps a row and two",
        "packed, normalized rows, odd offset of x",
        "packed, normalized rows, odd offset of the norm's weight",
    ),
    (*PACKED, 2, ROWS_WAY),
)
OF_EXPERTS = {
    "experts, blocks of experts": cuda_experts.CALLS["blocks of experts"],
    "experts, blocks of pairs": cuda_experts.CALLS["blocks of pairs"],
    "experts, gate and up": cuda_experts.CALLS["gate and up"],
    "experts, biases": cuda_experts.CALLS["biases"],
    "experts, gate and up with biases, both clipped": cuda_experts.CALLS[
        "gate and up with biases, both clipped"
    ],
}
CASES |= {name: call.case for name, call in OF_EXPERTS.items()}
CHECKS |= {name: lambda _, call=call: call.check() for name, call in OF_EXPERTS.items()}
CASES |= {
    "experts, chosen": cuda_experts.ROUTINGS[0],
    "experts, chosen with scores of all": cuda_experts.ROUTINGS[1],
    "experts, chosen of few": cuda_experts.ROUTINGS[3],
    "experts, chosen where logits are no numbers": cuda_experts.SPECIAL_ROUTINGS[0],
    "experts, added up": cuda_experts.ROUTINGS[1],
}
CHECKS |= {
    "experts, chosen": lambda choice: choice.check(launches.route),
    "experts, chosen with scores of all": lambda choice: choice.check(launches.route),
    "experts, chosen of few": lambda choice: choice.check(launches.route),
    "experts, chosen where logits are no numbers": lambda choice: choice.check(
        launches.route
    ),
    "experts, added up": lambda choice: choice.check_sum(launches.combine),
}


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
            judge = CHECKS.get(case, partial(check, names=MOVED.get(case, ())))
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
