"""The list of kernel instances has those that the planner and tuner ask for."""

from collections.abc import Iterator
from itertools import product

import pytest

import mlx_marlin
from mlx_marlin.backends.metal import choice
from mlx_marlin.backends.metal.candidates import plans
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.instances import variant_of
from mlx_marlin.backends.metal.kernel_limits import (
    GEMV_ROWS,
    THREE_FRAGMENTS_M,
    default_kernel,
    forms,
)
from mlx_marlin.planning.explicit import STAGED, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS
from support.profiles import sampled

CHIPS = ("Apple M1", "Apple M4 Pro", "Apple M3 Ultra")
SHAPES = (
    (330, 128),
    *product(
        (64, 95, 330, 1000, 2048, 4096, 8200, 17408, 128256),
        (64, 256, 1024, 4096, 11008),
    ),
)
"""n, k: few tiles and many, ragged and not, more threadgroups than tiles and fewer."""
ROWS = (1, 2, 3, 4, 5, 6, 9, 17, 33, 49)
BATCHES = (1, 3)


def considered(dtype: str, layout: str) -> Iterator[Plan]:
    """Yields every plan that is compared, or tried by a tuner, somewhere."""
    for (n, k), m, batch in product(SHAPES, ROWS, BATCHES):
        problem = Problem(
            m=m, n=n, k=k, batch=batch, dtype=dtype, scale_dtype=dtype, layout=layout
        )
        for device in map(Device.named, CHIPS):
            yield from plans(problem, device, default_kernel(problem, device))
            if m <= GEMV_ROWS[dtype]:
                yield from plans(problem, device, "gemv")
            if m >= 9 and dtype != "float32":
                yield from plans(problem, device, "gemm_tensor")
            if m > GEMV_ROWS[dtype]:
                for overrides in of_a_race(problem):
                    yield from choice.plans_with(problem, device, overrides)
            if batch > 1 or m <= 16:
                continue
            for buffers, loaders in STAGED:
                overrides = PlanOverrides(
                    kernel="gemm_staged", buffers=buffers, loaders=loaders
                )
                yield from choice.plans_with(problem, device, overrides)


def of_a_race(problem: Problem) -> Iterator[PlanOverrides]:
    """Yields what replaces a form that the guard refuses, and three fragments."""
    for form in forms(problem, 1)[1:]:
        yield PlanOverrides(kernel="gemm_register", operand=form)
    if -(-problem.m // 8) == THREE_FRAGMENTS_M and problem.dtype != "float32":
        for form in forms(problem, THREE_FRAGMENTS_M):
            yield PlanOverrides(
                kernel="gemm_register",
                fragments_m=THREE_FRAGMENTS_M,
                simdgroups_m=1,
                operand=form,
            )


def instance(plan: Plan) -> tuple[object, ...]:
    found = variant_of(plan)
    return found.name, found.template


@sampled(0, 2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_variant_is_one_that_some_plan_asks_for(dtype: str, layout: str) -> None:
    listed = {
        (each.name, each.template)
        for each in mlx_marlin.variants(
            mode="affine",
            bits=4,
            group_size=64,
            dtype=dtype,
            layout=layout,
            experiments=True,
        )
    }

    asked = {instance(plan) for plan in considered(dtype, layout)}

    assert listed - asked == set()
    assert asked - listed == set()


@pytest.mark.slow
def test_formats_have_instances_of_their_own() -> None:
    found = {
        (each.plan.problem.mode, each.plan.problem.bits, each.plan.problem.layout)
        for each in mlx_marlin.variants(dtype="float16")
    }

    assert found == {
        (mode, bits, layout)
        for (mode, bits), known in FORMATS.items()
        for layout in known.layouts
    }


@pytest.mark.parametrize("asked", [False, True])
def test_a_wish_narrows_the_list_and_asks_for_experiments(asked: bool) -> None:
    form = {"mode": "mxfp4", "dtype": "bfloat16", "layout": "marlin"}
    few = [each.plan for each in mlx_marlin.variants(**form, experiments=asked)]

    assert ("gemm_staged" in {plan.kernel for plan in few}) == asked
    found = {(p.mode, p.dtype, p.layout) for p in (plan.problem for plan in few)}
    assert found == {("mxfp4", "bfloat16", "marlin")}
    assert [*mlx_marlin.variants(mode="mxfp5")] == []
