"""Which experts rows choose, and the sum of what these return: kernels and operations.

The kernels run on the CPU here; on a GPU `test_cuda_kernels.py` has them too.
"""

from collections.abc import Callable

import cuda_experts
import mlx.core as mx
import numpy as np
import pytest
from cuda_on_cpu import needs_emulator

from mlx_marlin import derivatives, gather_launch
from mlx_marlin.integrations import routing
from mlx_marlin.integrations.routing import (
    MOST_EXPERTS,
    Routing,
    choose_experts,
    weighted_sum,
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the kernels that calls get, which return nothing."""
    found: list[str] = []
    for name in ("route", "combine"):
        monkeypatch.setattr(gather_launch, name, lambda *_, own=name: found.append(own))
    return found


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_a_kernel_chooses(case: cuda_experts.Choice) -> None:
    case.check(gather_launch.route)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_a_kernel_adds_up(case: cuda_experts.Choice) -> None:
    case.check_sum(gather_launch.combine)


@pytest.mark.parametrize("case", cuda_experts.ROUTINGS, ids=str)
def test_operations_of_mlx_choose_and_add_up(case: cuda_experts.Choice) -> None:
    def choice(
        logits: mx.array, choices: int, of_all: bool
    ) -> tuple[mx.array, mx.array]:
        experts, scores = routing.stock_choice(logits, Routing(choices, of_all))
        order = mx.argsort(-scores, axis=-1)  # MLX has none
        return tuple(mx.take_along_axis(each, order, -1) for each in (experts, scores))

    case.check(choice)
    case.check_sum(routing.stock_sum)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
def test_of_equal_logits_the_first_are_chosen() -> None:
    logits = mx.array([[0, 2, 1, 2, 2, 1], [3, 3, 3, 3, 3, 3]], mx.float16)
    experts, scores = gather_launch.route(logits, 4, False)
    assert experts.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3]]
    assert np.allclose(scores[1], 0.25)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("-inf")])
def test_rows_without_a_number_choose_experts_that_there_are(value: float) -> None:
    logits = mx.full((2, 5), value, mx.bfloat16)
    experts, _ = gather_launch.route(logits, 3, True)
    assert mx.max(experts).item() < 5


@pytest.mark.parametrize(
    ("experts", "choices", "dtype", "ours"),
    [
        (128, 8, mx.float16, True),
        (MOST_EXPERTS, 32, mx.bfloat16, True),
        (8, 2, mx.float32, False),
        (MOST_EXPERTS + 1, 8, mx.float16, False),
        (128, 33, mx.float16, False),
    ],
)
def test_calls_that_a_kernel_takes(
    backend: Callable[[str | None], None],
    launched: list[str],
    experts: int,
    choices: int,
    dtype: mx.Dtype,
    ours: bool,
) -> None:
    backend("cuda")
    with derivatives.left_out():
        choose_experts(mx.zeros((2, 3, experts), dtype), Routing(choices))
    assert launched == ["route"] * ours


def test_where_mlx_may_differentiate_its_operations_stay(
    backend: Callable[[str | None], None], launched: list[str]
) -> None:
    backend("cuda")
    logits = mx.random.normal((2, 8), key=mx.random.key(1)).astype(mx.float16)
    results = mx.ones((2, 3, 1, 4), mx.float16)

    def total(logits: mx.array) -> mx.array:
        _, scores = choose_experts(logits, Routing(3, of_all=True))
        return weighted_sum(results, scores, mx.zeros((2, 4), mx.float16)).sum()

    assert mx.abs(mx.grad(total)(logits)).max() > 0
    with derivatives.left_out():
        total_of_kernels = (
            choose_experts(logits, Routing(3)),
            weighted_sum(results, mx.ones((2, 3)), results[:, 0, 0]),
        )
    assert total_of_kernels == (None, None)
    assert launched == ["route", "combine"]


@pytest.mark.parametrize("where", ["emulator", "stock"])
def test_other_back_ends_have_no_such_kernels(
    backend: Callable[[str | None], None], launched: list[str], where: str
) -> None:
    backend(where)
    with derivatives.left_out():
        choose_experts(mx.zeros((2, 8), mx.float16), Routing(2))
    assert not launched


def test_no_rows_choose_nothing(
    backend: Callable[[str | None], None], launched: list[str]
) -> None:
    backend("cuda")
    with derivatives.left_out():
        experts, scores = choose_experts(mx.zeros((0, 8), mx.float16), Routing(2))
    assert experts.shape == scores.shape == (0, 2)
    assert not launched
