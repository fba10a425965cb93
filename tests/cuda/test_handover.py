"""From how many rows on stock MLX serves a product on a CUDA device."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda import backend as cuda
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem
from support.cuda_strategies import H200


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"n": 512, "k": 1024}, 5),
        ({"n": 14336, "k": 4096}, 8),
        ({"n": 28672, "k": 8192}, 32),
        ({"n": 28672, "k": 8192, "bits": 8}, 5),
    ],
    ids=["small", "large", "huge", "huge, 8 bits"],
)
def test_beyond_the_served_rows_stock_serves_with_a_reason(
    asked: dict[str, Any], most: int
) -> None:
    problem = Problem(m=most, **asked)
    more = replace(problem, m=most + 1)

    assert cuda.handover(problem, H200) is None
    assert f"{most + 1} rows on NVIDIA H200" in str(cuda.handover(more, H200))
    assert cuda.handover(replace(more, invariant=True), H200) is None
    assert planner.experiments(problem, H200) == []


MEASURED = {
    "qkv": (
        6144,
        {128: (33.2, 55.7), 320: (47.4, 66.7), 768: (125, 94), 2048: (241, 175)},
    ),
    "o": (4096, {128: (31.7, 49.3), 512: (52.8, 59.0), 2048: (179, 149)}),
    "gate and up": (28672, {128: (88, 168), 256: (164, 189), 2048: (1051, 727)}),
    "head": (128256, {256: (591, 847), 512: (1132, 1231), 2048: (4386, 3767)}),
}
"""Columns of a weight of 4096 -> rows -> microseconds of the kernel and of decoding the
weight first, on an H200 (docs/cuda.md)."""


@pytest.mark.parametrize("name", MEASURED)
def test_a_packed_weight_is_decoded_from_the_rows_on_at_which_that_is_faster(
    name: str,
) -> None:
    n, times = MEASURED[name]
    for m, (kernel, decoded) in times.items():
        problem = Problem(m=m, n=n, k=4096, layout="marlin")

        plan = planner.choose_dequantize(problem, H200)

        assert (plan is not None) == (decoded < kernel), m
        assert cuda.handover(problem, H200) is None


def test_only_a_single_packed_weight_may_be_decoded() -> None:
    many = Problem(m=4096, n=4096, k=4096, layout="marlin")

    dense = planner.choose_dequantize(many, H200)
    assert dense is not None
    assert dense.transposed
    changes: tuple[dict[str, Any], ...] = (
        {"layout": "mlx"},
        {"batch": 2},
        {"invariant": True},
        {"m": 64},
    )
    others = [replace(many, **change) for change in changes]
    assert [planner.choose_dequantize(each, H200) for each in others] == [None] * 4


def test_stock_mlx_has_no_part_in_a_plain_product() -> None:
    many = Problem(m=200, n=4096, k=4096, layout="marlin")

    assert cuda.handover(many, H200) is None
    assert planner.compare(many, device=H200).reason is None
    assert cuda.handover(replace(many, layout="mlx"), H200) is not None


def test_a_plan_that_is_asked_for_is_judged_by_its_own_time() -> None:
    problem = Problem(m=1, n=1024, k=4096, layout="marlin", norm=1e-5)
    plans = [each.plan for each in cuda.candidates(problem, H200, PlanOverrides())]
    slow = max(plans, key=lambda plan: cuda.predict(plan, H200).seconds)

    assert cuda.handover(problem, H200) is None
    assert cuda.handover(problem, H200, planner.propose(problem, H200).plan) is None
    assert "normalize the rows again" in str(cuda.handover(problem, H200, slow))
