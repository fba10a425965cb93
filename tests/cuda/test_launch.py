"""What a launch passes to `mx.fast.cuda_kernel`."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.backends import build, graph
from mlx_marlin.backends.cuda import launches as cuda_arguments
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products import packing
from mlx_marlin.products.packing import pack
from support.arguments import activations, weight
from support.choose import Choose
from support.cuda_launches import FUSED, RING, SPLIT, WHOLE, K, N, blanks, plan_of
from support.recorder import Recorder


@pytest.mark.parametrize(
    ("way", "threads", "shared"),
    [
        (WHOLE | {"layout": "marlin"}, 32 * 3 * 2, 3 * 2 * 16 * 36 * 4),
        (RING, 32 * (4 * 2 + 4), 512 + 4 * 16 * 128 * 2),  # with its loaders
    ],
    ids=str,
)
def test_a_product_is_one_launch_of_whole_blocks(
    recorder: Recorder, way: dict[str, Any], threads: int, shared: int
) -> None:
    plan = plan_of(**way)

    y = graph.product(plan)(*blanks(plan))

    assert (y.shape, y.dtype) == ((9, N), mx.float16)
    (built,), (call,) = recorder.built, recorder.called
    assert built["shared_memory"] == plan.threadgroup_bytes == shared
    assert built["input_names"] == ["x", "w", "scales", "numbers"]
    assert built["output_names"] == ["out"]
    assert "atomic_outputs" not in built
    assert call["grid"] == (plan.num_threadgroups * threads, 1, 1)
    assert call["threadgroup"] == (plan.threads, 1, 1) == (threads, 1, 1)
    assert call["output_shapes"] == [(9, N)]
    assert "init_value" not in call
    assert call["template"] == [*cuda_arguments.product_template(plan).items()]
    # Small arrays go as they are: CUDA has no other address space for them.
    _, w, scales, numbers = call["inputs"]
    assert (w.shape, scales.shape) == ((4,), (2,))
    assert numbers.tolist() == [*build.shape(plan), *build.schedule(plan)]


@pytest.mark.parametrize("way", [WHOLE, SPLIT], ids=str)
def test_each_part_is_an_array_of_its_own(
    recorder: Recorder, way: dict[str, Any]
) -> None:
    parts = 40, 6, N - 46
    plan = plan_of(**way, epilogue=Epilogue(parts=parts))

    results = graph.product(plan)(*blanks(plan))

    assert isinstance(results, tuple)
    assert [each.shape for each in results] == [(9, columns) for columns in parts]
    built, call = recorder.built[-1], recorder.called[-1]
    assert built["output_names"] == ["out0", "out1", "out2"]
    assert call["output_dtypes"] == [mx.float16] * 3


def test_layers_that_share_x_are_a_kernels_outputs(recorder: Recorder) -> None:
    x, packed = (
        activations(2, 3, K, dtype=mx.float16),
        pack(*weight(N, K, dtype=mx.float16)),
    )

    results = mlx_marlin.linears(x, packed, parts=(32, N - 32))

    assert [each.shape for each in results] == [(2, 3, 32), (2, 3, N - 32)]
    assert recorder.called[-1]["output_shapes"] == [each.shape for each in results]


def test_a_split_product_is_summed_by_a_second_launch(recorder: Recorder) -> None:
    plan = plan_of(**SPLIT, epilogue=FUSED)

    y = graph.product(plan)(*blanks(plan, arrays=7))

    assert (y.shape, y.dtype) == ((9, N), mx.float16)
    product, reduce = recorder.called
    assert product["output_shapes"] == [(2, 9, N)]
    assert product["output_dtypes"] == [mx.float32]
    assert len(product["inputs"]) == 5
    partials, *finish, _ = reduce["inputs"]
    assert partials.shape == (2, 9, N)
    assert [each.shape for each in finish] == [(3,)] * 2  # no multiplier
    assert reduce["grid"] == (3 * N, 1, 1)
    assert ("SIMDGROUPS_N", 2) in reduce["template"]
    assert [each["shared_memory"] for each in recorder.built] == [
        plan.threadgroup_bytes,
        0,
    ]


def test_another_block_is_another_kernel_and_the_same_is_built_once(
    recorder: Recorder,
) -> None:
    plans = [plan_of(**WHOLE | {"simdgroups_k": warps_k}) for warps_k in (2, 5, 2)]

    for plan in plans:
        graph.product(plan)(*blanks(plan))

    shared = [each["shared_memory"] for each in recorder.built]
    assert shared == [plan.threadgroup_bytes for plan in plans[:2]]


def test_without_cuda_a_kernel_is_an_error_when_it_runs(backend: Choose) -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    backend("cuda")
    plan = plan_of(**WHOLE)
    multiply = graph.product(plan)

    with pytest.raises(
        ValueError,
        match=r"marlin_mma cannot run.*='cuda' needs a CUDA device.*expected",
    ):
        multiply(*blanks(plan))


def test_packing_needs_no_kernel(recorder: Recorder) -> None:
    w = weight(N, K, dtype=mx.float16)[0]

    tiles = packing.to_tiles(w, N, K, bits=4, group_size=64)
    rows = packing.to_rows(tiles, N, K, bits=4, group_size=64)

    assert mx.array_equal(rows, w)
    assert recorder.built == []
