"""Which calls of `gather_qmm` are stock MLX's, and which are errors."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.products import serving
from mlx_marlin.products.packing import pack
from support.arguments import packed_unread
from support.gather_calls import K, kind, weights


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transpose": False}, "single rows times transposed"),
        ({"x_shape": (5, 1, 3, K)}, "single rows times transposed"),
        ({"bits": 7}, "mode='affine' with bits=7 is not one"),
        ({"global_scale": True}, "take no global scale"),
        (
            {"mode": "nvfp4", "group_size": 16, "x_shape": (5, 1, 1, 48), "k": 48},
            "k=48 is not a multiple of 64",
        ),
        ({"pairs": (0, 2)}, "nothing to add up"),
        ({"dtype": mx.complex64}, "dtype='complex64' is not one"),
    ],
)
def test_what_stock_serves_has_a_reason(changes: dict[str, Any], words: str) -> None:
    assert words in str(serving.serve(kind(**changes), serving.here()))
    assert isinstance(serving.serve(kind(), serving.here()), GatherPlan)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_calls_of_other_kinds_are_mlxs_and_without_kernels_all(
    served: str, packed: bool, transpose: bool
) -> None:
    native = weights(4, 64, "affine", 4, 64, mx.float32)
    stored = (pack(*native),) if packed else native
    rows = 1 if served == "stock" else 3
    x = mx.random.normal((5, 1, rows, K if transpose else 64))
    chosen = mx.array([0, 3, 1, 1, 2])[:, None]

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen, transpose=transpose)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen, transpose=transpose)
    assert mx.array_equal(y, expected)


EXPERTS = weights(4, 40, "affine", 4, 64, mx.float32)
PACKED = packed_unread(*EXPERTS)
ONE = packed_unread(*(each[0] for each in EXPERTS))
NESTED = packed_unread(*(each[None] for each in EXPERTS))
CHOSEN = mx.array([[0], [3]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((PACKED, EXPERTS[1]), {}, "carries its scales"),
        ((PACKED,), {"group_size": 32}, "do not fit the packed weight"),
        ((PACKED,), {"global_scale": mx.ones(4)}, "global_scale"),
        (
            (ONE,),
            {},
            "expected a batch [experts, n",
        ),
        (
            (NESTED,),
            {},
            "shape (1, 4, 40, 128)",
        ),
        ((PACKED,), {"transpose": False}, "[gather_qmm]"),
        ((PACKED,), {"rhs_indices": mx.ones((2, 1))}, "[gather_qmm]"),
    ],
)
def test_what_is_wrong_with_a_packed_call_is_said(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    x = mx.random.normal((2, 1, 1, K))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        mlx_marlin.gather_qmm(x, *arguments, **({"rhs_indices": CHOSEN} | options))

    assert words in str(error.value)
    with pytest.raises(TypeError, match="scales is None"):
        mlx_marlin.gather_qmm(x, EXPERTS[0], rhs_indices=CHOSEN)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packed", [False, True])
def test_what_stock_would_serve_cannot_be_invariant(packed: bool) -> None:
    stored = (PACKED,) if packed else EXPERTS
    options: dict[str, Any] = {"rhs_indices": CHOSEN, "invariant": True}

    with pytest.raises(ValueError, match=r"invariant=True cannot .* single rows"):
        mlx_marlin.gather_qmm(mx.zeros((2, 1, 3, K)), *stored, **options)
    with pytest.raises(ValueError, match=r"invariant=True cannot .* and indices"):
        mlx_marlin.gather_qmm(mx.zeros((4, 1, K)), *EXPERTS, invariant=True)
