"""Which experts rows choose, and the sum of what these return: kernels and operations.

The kernels run on the CPU here; on a GPU `cuda/test_kernels_on_gpu.py` has them too.
"""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.backends import graph
from mlx_marlin.lm.tracing.experts import (
    choose_experts,
    has_kernel,
    scores_of,
    stock_sum,
    weighted_sum,
)
from mlx_marlin.lm.tracing.model_families import Routing
from mlx_marlin.planning.block_plans import MAX_EXPERTS
from mlx_marlin.products import autodiff
from support import cuda_experts, launches
from support.choose import Choose
from support.profiles import sampled


@pytest.fixture
def cuda(backend: Choose) -> None:
    backend("cuda")


@sampled(3)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_kernels_choose_and_add_up(case: cuda_experts.Choice) -> None:
    case.check(launches.route)
    case.check_sum(launches.combine)


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", cuda_experts.SPECIAL_ROUTINGS, ids=str)
def test_logits_that_are_no_numbers(case: cuda_experts.SpecialChoice) -> None:
    case.check(launches.route)


@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_operations_of_mlx_choose_and_add_up(case: cuda_experts.Choice) -> None:
    how = case.each, case.of_all, case.last
    _, scores = cuda_experts.choice_of_mlx(case.logits, *how)
    # In another order, and of equal logits others.
    assert np.allclose(-mx.sort(-scores, axis=-1), case.expected[1], rtol=1e-5, atol=0)
    case.check_sum(stock_sum)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("-inf")])
def test_rows_without_a_number_choose_experts_that_there_are(value: float) -> None:
    logits = mx.full((2, 5), value, mx.bfloat16)
    experts, _ = launches.route(logits, 3, True, False)
    assert mx.max(experts).item() < 5


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("experts", "choices", "dtype", "ours"),
    [
        (128, 8, mx.float16, True),
        (MAX_EXPERTS, 32, mx.bfloat16, True),
        (8, 2, mx.float32, False),
        (MAX_EXPERTS + 1, 8, mx.float16, False),
        (128, 33, mx.float16, False),
        (4, 5, mx.float16, False),
    ],
)
def test_choices_that_a_kernel_makes(
    experts: int, choices: int, dtype: mx.Dtype, ours: bool
) -> None:
    logits = mx.zeros((2, 3, experts), dtype)
    assert has_kernel(logits, Routing(choices)) == ours
    assert not has_kernel(logits[:0], Routing(choices))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("of_all", [False, True])
def test_scores_and_sums_have_the_derivatives_of_mlx(of_all: bool) -> None:
    draw = np.random.default_rng(3).normal
    shapes = (2, 8), (2, 3, 1, 4), (2, 4)
    arrays = [mx.array(draw(size=each)).astype(mx.float16) for each in shapes]

    def total(choose: Any, add: Any, *given: mx.array) -> mx.array:
        logits, results, residual = given
        _, scores = choose(logits)
        return (add(results, scores, residual).astype(mx.float32) ** 2).sum()

    ours = partial(total, lambda x: choose_experts(x, Routing(3, of_all)), weighted_sum)
    chosen = mx.argsort(-arrays[0])[:, :3]
    # The order of the chosen decides which result has which score: the largest first.
    stock = partial(
        total,
        lambda x: (None, scores_of(x, chosen, Routing(3, of_all))),
        stock_sum,
    )

    found, expected = (
        mx.grad(each, argnums=(0, 1, 2))(*arrays) for each in (ours, stock)
    )

    for own, each in zip(found, expected, strict=True):
        assert mx.abs(each).max() > 0
        assert mx.allclose(own, each, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [(2, 3), (3, 2), (3, 3)])
def test_sums_of_arrays_that_do_not_fit_are_refused(rows: tuple[int, int]) -> None:
    scores, residual = mx.zeros((rows[0], 3)), mx.zeros((rows[1], 4))
    with pytest.raises(ValueError, match=r"expected \[..., choices, 1, n\]"):
        weighted_sum(mx.zeros((2, 3, 1, 4)), scores, residual)


def test_where_nobody_differentiates_scores_are_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = mx.array([1]), mx.array([0.5])
    monkeypatch.setattr(graph, "call", lambda _: lambda _: results)
    with autodiff.without_vjp():
        assert choose_experts(mx.zeros((1, 2)), Routing(1)) == results
