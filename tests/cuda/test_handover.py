"""From how many rows on stock MLX serves a product on a CUDA device."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.planning.problem import Problem
from support.cuda_strategies import H200


# A packed weight alone is decoded beyond these rows; several of them are not.
@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"n": 512, "k": 1024, "layout": "marlin", "batch": 2}, 128),
        ({"n": 512, "k": 1024}, 5),
        ({"n": 14336, "k": 4096}, 8),
        ({"n": 28672, "k": 8192}, 32),
        ({"n": 28672, "k": 8192, "bits": 8}, 5),
    ],
    ids=["packed", "small", "large", "huge", "huge, 8 bits"],
)
def test_beyond_the_served_rows_stock_serves_with_a_reason(
    asked: dict[str, Any], most: int
) -> None:
    problem = Problem(m=most, **asked)
    more = replace(problem, m=most + 1)

    assert planner.stock_reason(problem, H200) is None
    assert f"{most + 1} rows on NVIDIA H200" in str(planner.stock_reason(more, H200))
    assert planner.stock_reason(replace(more, invariant=True), H200) is None
    assert planner.experiments(problem, H200) == []


def test_many_rows_of_a_packed_weight_are_a_plain_product() -> None:
    few = Problem(m=128, n=512, k=1024, layout="marlin")
    many = replace(few, m=129)

    dense = planner.choose_dequantize(many, H200)
    assert dense is not None
    assert dense.transposed
    others = (
        few,
        replace(many, layout="mlx"),
        replace(many, batch=2),
        replace(many, invariant=True),
    )
    assert [planner.choose_dequantize(each, H200) for each in others] == [None] * 4


def test_stock_mlx_has_no_part_in_a_plain_product() -> None:
    many = Problem(m=200, n=4096, k=4096, layout="marlin")

    assert planner.stock_reason(many, H200) is None
    assert planner.compare(many, device=H200).reason is None
    assert planner.stock_reason(replace(many, layout="mlx"), H200) is not None
