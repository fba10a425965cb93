"""Plans and texts of products that rotate heads: chosen, refused, predicted."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner, result_files
from mlx_marlin.backends.cuda import backend as cuda
from mlx_marlin.backends.cuda.cost import OWN_ROPE_SECONDS
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.measurement import Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import TILE_N
from support import cuda_cases
from support.cuda_cases import EPSILON, NORMED_HEADS, ROTATED_N, ROTATION
from support.rotated_layers import OF_128, PARTS

H200 = cuda_cases.h200()

A100 = CudaDevice.named("NVIDIA A100")


def test_a_rope_follows_where_wide_tiles_would_take_longer() -> None:
    sizes = 5120, 1024, 1024
    epilogue = Epilogue(rotation=Rotation(128, 6144, per_row=True), parts=sizes)
    rows = problem_of(48, sum(sizes), 5120, layout="marlin", epilogue=epilogue)
    few = problem_of(4, sum(sizes), 5120, layout="marlin", epilogue=epilogue)

    assert "more time than a rope takes" in str(cuda.handover(rows, A100))
    assert cuda.handover(rows, H200) is None
    assert cuda.handover(few, A100) is None


def test_norms_that_are_spared_pay_for_wide_tiles() -> None:
    rotation = Rotation(128, 6144, per_row=True, norm=EPSILON, queries=5120)
    epilogue = Epilogue(rotation=rotation)
    heads = problem_of(48, 7168, 5120, layout="marlin", epilogue=epilogue)
    bare = replace(heads, epilogue=Epilogue())

    inside, own = (
        planner.predict(planner.choose(each, A100), A100).seconds
        for each in (heads, bare)
    )

    assert 2 * OWN_ROPE_SECONDS < inside - own < 18e-6
    assert cuda.handover(heads, A100) is None


@given(
    m=st.integers(1, 130),
    heads=st.integers(1, 40),
    features=st.sampled_from([64, 128, 192, 256]),
    k=st.integers(1, 40).map(lambda groups: 64 * groups),
    norm=st.sampled_from([None, EPSILON]),
)
def test_plans_have_both_halves_of_a_head_in_a_block(
    m: int, heads: int, features: int, k: int, norm: float | None
) -> None:
    epilogue = Epilogue(rotation=Rotation(features, features, norm=norm))
    problem = problem_of(m, heads * features, k, layout="marlin", epilogue=epilogue)

    plan = planner.choose(problem, H200)

    whole = 2 * TILE_N if norm is None else features  # with a norm, the whole head
    assert plan.tile.n % whole == 0
    assert not plan.is_split


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gated": True}, "follows a bias only, got gated=True"),
        ({"activation": "silu"}, "activation='silu'"),
        ({"multiply": True}, "multiply=True"),
        ({"residual": True}, "residual=True"),
        ({"parts": (64, 32)}, r"of whole heads, got parts=\(64, 32\)"),
        ({"rotation": Rotation(64, 96)}, "columns=96"),
        ({"rotation": Rotation(64, -64)}, "columns=-64"),
        ({"rotation": Rotation(33, 66)}, "even number of features"),
        ({"rotation": Rotation(0, 0)}, "even number of features"),
        ({"rotation": Rotation(64, 128, factor=0.0)}, "a positive, finite factor"),
        ({"rotation": Rotation(64, 128, factor=math.nan)}, "a positive, finite factor"),
        ({"rotation": Rotation(64, 128, norm=-1.0)}, "a norm of at least 0"),
        ({"rotation": Rotation(64, 128, norm=1.0, queries=32)}, "queries=32"),
        ({"rotation": Rotation(64, 128, norm=1.0, queries=192)}, "within its columns"),
        ({"rotation": Rotation(64, 128, norm=1.0, queries=-64)}, "within its columns"),
        ({"rotation": Rotation(64, 128, queries=64)}, "without a norm there are none"),
    ],
)
def test_what_is_no_rotation_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Epilogue(**{"rotation": ROTATION, **more})


def of_heads(*, n: int, batch: int = 1) -> Problem:
    epilogue = Epilogue(rotation=ROTATION)
    return Problem(m=1, n=n, k=64, batch=batch, epilogue=epilogue)


WHOLE_HEADS = "needs one product of whole heads"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: of_heads(n=224), WHOLE_HEADS),
        (lambda: of_heads(n=128), WHOLE_HEADS),
        (lambda: of_heads(n=256, batch=2), WHOLE_HEADS),
        (lambda: planned(simdgroups_n=3), "simdgroups_n=3, reduction='none'"),
        (
            lambda: planned(simdgroups_n=2, strategy="split_k", k_parallel=2),
            "reduction='workspace'",
        ),
        (
            lambda: planned(replace(OF_128, columns=256), simdgroups_n=2),
            "a multiple of 4 as simdgroups_n",
        ),
        (lambda: planned(Rotation(32, 64)), "32 columns, and heads have 32 features"),
        (
            lambda: planner.make(asked(layout="mlx")),
            r"rotation=.* needs a CUDA kernel",
        ),
    ],
)
def test_what_parts_heads_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_result_with_a_rotation_is_read_as_it_was_written() -> None:
    plan = planner.choose(asked(NORMED_HEADS, PARTS), H200)
    times = {label(plan): 1.0}
    result = Result(
        plan=plan, stock=False, medians_us=times, clock="wall time", date="2026-11-22"
    )
    row = json.loads(json.dumps(result_files.row(result)))
    assert result_files.decoded(row).plan.problem == plan.problem


def asked(
    rotation: Rotation = ROTATION, parts: tuple[int, ...] = (), layout: str = "marlin"
) -> Problem:
    epilogue = Epilogue(rotation=rotation, parts=parts)
    return problem_of(1, ROTATED_N, 1024, layout=layout, epilogue=epilogue)


def planned(rotation: Rotation = ROTATION, **overrides: Any) -> Plan:
    return planner.make(asked(rotation), device=H200, **overrides)
