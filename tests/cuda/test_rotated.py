"""Heads that a product rotates as it stores them: on the CPU, in plans, in a layer."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import rope_utils

from mlx_marlin import emulator
from mlx_marlin.backends import launch, planner, registry
from mlx_marlin.backends.cuda import limits, source
from mlx_marlin.backends.cuda.cost import OWN_ROPE_SECONDS
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.integrations.tracing.fused_rope import freqs_of
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning import measurement
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.measurement import Result, label
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import TILE_N
from support import cuda_cases, cuda_on_cpu, epilogues, oracles
from support.cuda_cases import (
    EPSILON,
    GATED_WAYS,
    HEAD_EPSILON,
    NORMED_HEADS,
    NORMED_WAYS,
    ROTATED_N,
    ROTATION,
    Case,
    norm_of,
    normalized,
)
from support.cuda_on_cpu import needs_emulator
from support.oracles import exact

H200 = cuda_cases.h200()
A100 = CudaDevice.named("NVIDIA A100")
EACH = replace(ROTATION, each=True)
PARTS = (128, 64, 64)
Heads = tuple[Rotation, int, tuple[int, ...]]
HEADS: tuple[Heads, ...] = (
    (ROTATION, 256, PARTS),
    (EACH, 256, ()),
    (Rotation(128, 256, each=True), 384, (128, 128, 128)),
    (Rotation(256, 256), 512, ()),
    (Rotation(64, 0), 128, ()),
    (Rotation(64, 128), 128, (64, 64)),
    (Rotation(192, 384, each=True), 576, (192, 192, 192)),
    (Rotation(64, 64, factor=1.25), 128, (64, 64)),
)
"""Rotations, columns and parts: heads of several sizes, none, and all rotated."""
EACH_HEADS = [*zip(2 * HEADS, cycle((1, 3, 4)), cycle((False, True)), strict=False)]
"""Twice, with each kernel in turn, and with a bias or without."""
OF_128 = Rotation(128, 256, norm=HEAD_EPSILON, queries=128)
NORMED_ROTATIONS: tuple[tuple[Heads, int, dict[str, int]], ...] = (
    ((NORMED_HEADS, 256, PARTS), 0, {}),
    ((replace(NORMED_HEADS, each=False), 256, ()), 4, {}),
    ((replace(OF_128, each=True), 384, (128, 256)), 0, {"simdgroups_n": 4}),
    ((replace(OF_128, columns=384), 640, ()), 3, {"simdgroups_n": 8}),
    ((OF_128, 256, (128, 128)), 4, {"simdgroups_n": 4}),
    (
        (Rotation(192, 576, norm=0.5, queries=384), 768, (384, 384)),
        2,
        {"simdgroups_n": 6},
    ),
    ((Rotation(256, 256, norm=0.0, factor=0.75), 512, ()), 1, {"simdgroups_n": 8}),
)
"""Of heads with norms: kernels, and tiles that have one head or several."""


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("call", "dtype"), [*zip(GATED_WAYS, cycle(limits.DTYPES), strict=False)], ids=str
)
def test_integers_are_exact_at_the_first_place(
    call: tuple[int, dict[str, Any]], dtype: str
) -> None:
    m, way = call
    weight, x, expected = cuda_cases.integers(dtype, m, way, ROTATED_N)
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    epilogue = Epilogue(rotation=ROTATION, parts=PARTS)
    plan = cuda_on_cpu.plan_of(case, epilogue=epilogue, n=ROTATED_N)
    place, periods = mx.zeros(1, mx.int32), cuda_cases.periods_of(ROTATION)

    parts = cuda_on_cpu.run(plan, x, weight, x, x, x, place, periods)

    assert [y.shape for y in parts] == [(m, n // 64, 1, 64) for n in PARTS]
    y = np.concatenate([exact(y).reshape(m, -1) for y in parts], axis=-1)
    assert np.array_equal(y, expected)


@pytest.mark.thinned(6)
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("heads", "way", "bias"), EACH_HEADS, ids=str)
def test_heads_of_any_size(heads: Heads, way: int, bias: bool) -> None:
    rotation, n, parts = heads
    case: Case = ("affine", 4, 64, "marlin", "float16", *GATED_WAYS[way])
    cuda_on_cpu.check_rotated(
        case, Epilogue(bias=bias, rotation=rotation, parts=parts), n
    )


@pytest.mark.thinned(4)
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("heads", "way", "overrides"), NORMED_ROTATIONS, ids=str)
def test_heads_may_be_normalized_before(
    heads: Heads, way: int, overrides: dict[str, int]
) -> None:
    (rotation, n, parts), (m, own) = heads, GATED_WAYS[way]
    case: Case = ("affine", 4, 64, "marlin", "float16", m, own | overrides)
    bias = bool(way % 2)
    epilogue = Epilogue(bias=bias, rotation=rotation, parts=parts)
    cuda_on_cpu.check_rotated(case, epilogue, n)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "format",
    [
        ("affine", 3, 32, "marlin", "bfloat16"),
        ("nvfp4", 4, 16, "marlin", "float16"),
        ("affine", 8, 64, "mlx", "bfloat16"),
    ],
    ids=str,
)
def test_formats(format: tuple[str, int, int, str, str]) -> None:
    case: Case = (*format, *GATED_WAYS[0])
    cuda_on_cpu.check_rotated(case, Epilogue(rotation=ROTATION), ROTATED_N)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bias", [False, True])
def test_rows_may_be_normalized_before(bias: bool) -> None:
    m, way = NORMED_WAYS[1]
    case: Case = ("affine", 4, 64, "marlin", "float16", m, way | {"simdgroups_n": 6})
    epilogue = Epilogue(bias=bias, rotation=EACH, parts=PARTS)
    cuda_on_cpu.check_rotated(case, epilogue, ROTATED_N, norm=EPSILON)


@pytest.mark.thinned(6)
@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("streams", [1, 3, 12])
@pytest.mark.parametrize("rotation", [ROTATION, EACH, NORMED_HEADS])
@pytest.mark.parametrize("parts", [(), PARTS], ids=str)
def test_a_layer_rotates_its_heads(
    streams: int, rotation: Rotation, parts: tuple[int, ...]
) -> None:
    bias = rotation.each == (streams == 3)
    layer, norm, x = layer_of(bias=bias), norm_module(), rows_of(streams)
    given = *arrays_of(streams, rotation), cuda_cases.norms_of(rotation, mx.float16)

    y = layer.rotated(x, norm, rotation, parts, *given)

    results = [*y] if parts else [y]
    assert [part.shape[1] for part in results] == ([2, 1, 1] if parts else [4])
    y = mx.concatenate(results, axis=1)
    native = layer_of(layout="mlx", bias=bias).native()
    normed = normalized(x.reshape(streams, -1), norm.weight, norm.eps)
    total = oracles.product(mx.array(normed), *native, group_size=64)
    total = total + exact(layer["bias"]) if bias else total
    places, periods, norms = given
    expected = epilogues.rotated(total, rotation, places, periods, *norms)
    assert y.dtype == mx.float16
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    built = [plan.problem for plan in launch.plans_built()]
    assert built[-1].epilogue.rotation == rotation
    assert (built[-1].norm is not None) == (streams <= 8)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rotation", [EACH, NORMED_HEADS])
@pytest.mark.parametrize("parts", [(), PARTS], ids=str)
def test_gradients_are_those_of_mlxs_operations(
    parts: tuple[int, ...], rotation: Rotation
) -> None:
    layer, norm, x = layer_of(bias=True), norm_module(), rows_of(2)
    places, periods = arrays_of(2, rotation)
    norms = cuda_cases.norms_of(rotation, mx.float16)

    def loss(heads: Any) -> mx.array:
        whole = mx.concatenate([*heads], axis=1) if parts else heads
        weights = mx.arange(whole.size).reshape(whole.shape) / whole.size
        total: mx.array = (whole * weights).sum()
        return total

    def inside(x: mx.array, bias: mx.array, *norms: mx.array) -> mx.array:
        layer["bias"] = bias
        return loss(layer.rotated(x, norm, rotation, parts, places, periods, norms))

    def apart(x: mx.array, bias: mx.array, *norms: mx.array) -> mx.array:
        own = layer_of(layout="mlx", bias=True)
        own.set_dtype(x.dtype)
        native = own["weight"], own["scales"], own["biases"]
        y = mx.quantized_matmul(norm(x), *native, group_size=64) + bias
        y = y.reshape(2, 4, 1, 64)
        heads = [y[:, :2], y[:, 2:3]]
        if norms:
            pairs = zip(heads, norms, strict=True)
            heads = [
                mx.fast.rms_norm(each, weight, HEAD_EPSILON) for each, weight in pairs
            ]
        turned = mx.fast.rope(
            mx.concatenate(heads, axis=1),
            64,
            traditional=False,
            base=None,
            scale=1.0,
            offset=places,
            freqs=periods,
        )
        y = mx.concatenate([turned, y[:, 3:]], axis=1)
        return loss(mx.split(y, [2, 3], axis=1) if parts else y)

    given = x, layer["bias"], *norms
    ours = mx.grad(inside, argnums=[*range(len(given))])(*given)
    assert launch.plans_built()[-1].problem.epilogue.rotation == rotation
    expected = mx.grad(apart, argnums=[*range(len(given))])(*given)
    wide = mx.grad(apart, argnums=[*range(len(given))])(
        *(each.astype(mx.float32) for each in given)
    )
    for each, own, truth in zip(ours, expected, wide, strict=True):
        # Both round what lies between, after each operation and not the same ones.
        assert truth.dtype == mx.float32
        most = max(2 * oracles.error(own, exact(truth)), 1e-3)
        assert oracles.error(each, exact(truth)) < most


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "how", ["invariant", "mlx", "wide bias", "wide norms", "small heads", "large heads"]
)
def test_where_kernels_have_no_rotation_there_is_none(how: str) -> None:
    layer = layer_of(layout="mlx" if how == "mlx" else "marlin", bias=True)
    layer.invariant = how == "invariant"
    if how == "wide bias":
        layer["bias"] = layer["bias"].astype(mx.float32)
    rotation = {
        "wide norms": NORMED_HEADS,
        "small heads": Rotation(32, 64),
        "large heads": Rotation(512, 512, norm=EPSILON),
    }.get(how, ROTATION)
    if how == "large heads":
        layer = layer_of(n=512, bias=True)
    assert_none(layer, rotation, mx.float32 if how == "wide norms" else mx.float16)


@needs_emulator
@pytest.mark.usefixtures("on_cpu")
def test_nor_of_a_vector() -> None:
    x, arrays = rows_of(1)[0, 0], arrays_of(1, ROTATION)
    assert layer_of().rotated(x, norm_module(), ROTATION, (), *arrays) is None


@pytest.mark.parametrize("name", ["emulator", "stock"])
def test_nor_elsewhere(backend: Callable[[str | None], None], name: str) -> None:
    if name == "emulator" and emulator.unavailable() is not None:
        pytest.skip("the emulator does not run here")
    backend(name)
    assert_none(layer_of(), ROTATION)


@pytest.mark.parametrize(
    ("places", "periods", "words"),
    [
        (mx.zeros(1, mx.int32), mx.ones(32), r"int32 \(1,\), expected int32 \[2\]"),
        (mx.zeros(2, mx.int64), mx.ones(32), "positions are mlx.core.int64"),
        (mx.zeros((), mx.int32), mx.ones(32), "expected int32"),
        (mx.zeros(2, mx.int32), mx.ones(64), r"\(64,\), expected float32 \[32\]"),
        (
            mx.zeros(2, mx.int32),
            mx.ones(32, mx.float16),
            "freqs are mlx.core.float16",
        ),
    ],
)
def test_arrays_that_are_no_rotations_are_refused(
    places: mx.array, periods: mx.array, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layer_of().rotated(rows_of(2), norm_module(), EACH, (), places, periods)


@pytest.mark.parametrize(
    ("rotation", "norms", "words"),
    [
        (EACH, (mx.ones(64), mx.ones(64)), r"expected \[\] with norm=None"),
        (NORMED_HEADS, (), r"\[\], expected \[\(64,\), \(64,\)\] with norm=4.0"),
        (NORMED_HEADS, (mx.ones(64), mx.ones(32)), r"\(32,\)\], expected"),
    ],
)
def test_norms_that_are_not_the_rotations_are_refused(
    rotation: Rotation, norms: tuple[mx.array, ...], words: str
) -> None:
    given = *arrays_of(2, rotation), norms
    with pytest.raises(ValueError, match=words):
        layer_of().rotated(rows_of(2), norm_module(), rotation, (), *given)


def test_one_place_for_all_rows_is_no_number() -> None:
    x, norm = rows_of(2), norm_module()
    for wrong in (mx.zeros((), mx.int32), mx.zeros(0, mx.int32)):
        with pytest.raises(ValueError, match=r"expected int32 \[1 or more\]"):
            layer_of().rotated(x, norm, ROTATION, (), wrong, mx.ones(32))


def assert_none(
    layer: MarlinLinear, rotation: Rotation, norms: mx.Dtype = mx.float16
) -> None:
    arrays = *arrays_of(2, rotation), cuda_cases.norms_of(rotation, norms)
    assert layer.rotated(rows_of(2), norm_module(), rotation, (), *arrays) is None
    assert not any(plan.problem.epilogue.rotation for plan in launch.plans_built())


def arrays_of(m: int, rotation: Rotation) -> tuple[mx.array, mx.array]:
    return cuda_cases.places_of(m, rotation), cuda_cases.periods_of(rotation)


def rows_of(streams: int) -> mx.array:
    drawn = mx.random.normal((streams, 1, 128), key=mx.random.key(1))
    return drawn.astype(mx.float16)


def norm_module() -> nn.RMSNorm:
    norm = nn.RMSNorm(128, eps=EPSILON)
    norm.weight = norm_of(mx.zeros((1, 128), mx.float16))
    return norm


def layer_of(
    layout: str = "marlin", *, n: int = ROTATED_N, bias: bool = False
) -> MarlinLinear:
    mx.random.seed(3)
    linear = nn.Linear(128, n, bias=bias)
    linear.set_dtype(mx.float16)
    return MarlinLinear.from_linear(linear, 64, 4, layout=layout)


LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(64),
        nn.RoPE(64, base=5e5, scale=0.25),
        rope_utils.Llama3RoPE(64, base=5e5, scaling_config=LLAMA3),
        rope_utils.YarnRoPE(64, scaling_factor=32.0),
    ],
    ids=lambda rope: f"{type(rope).__name__} {vars(rope).get('scale', '')}",
)
def test_periods_are_a_ropes(rope: nn.Module) -> None:
    rotation = Rotation(64, 64, each=True, factor=getattr(rope, "mscale", 1))
    places = mx.array([0, 1, 100, 30000], mx.int32)
    heads = mx.random.normal((4, 1, 1, 64), key=mx.random.key(2))
    periods = freqs_of(rope, 64)
    assert periods is not None

    turned = epilogues.rotated(exact(heads)[:, 0, 0], rotation, places, periods)

    # Periods are rounded, and with them angles, the more the further the place.
    assert oracles.error(rope(heads, offset=places), turned) < 1e-3
    assert oracles.error(rope(heads, offset=places)[:3], turned[:3]) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(64, traditional=True),
        nn.RoPE(32),
        rope_utils.SuScaledRoPE(64, long_factor=2.0),
        rope_utils.YarnRoPE(64, traditional=True),
        rope_utils.YarnRoPE(64, scaling_factor=32.0, mscale=-10),
        rope_utils.Llama3RoPE(64, traditional=True, scaling_config=LLAMA3),
    ],
    ids=lambda rope: type(rope).__name__,
)
def test_other_ropes_have_none(rope: nn.Module) -> None:
    assert freqs_of(rope, 64) is None


def test_nor_has_one_whose_periods_are_rounded() -> None:
    rope = rope_utils.Llama3RoPE(64, scaling_config=LLAMA3)
    rope._freqs = rope._freqs.astype(mx.float16)
    assert freqs_of(rope, 64) is None


def test_a_rope_follows_where_wide_tiles_would_take_longer() -> None:
    sizes = 5120, 1024, 1024
    epilogue = Epilogue(rotation=Rotation(128, 6144, each=True), parts=sizes)
    rows = problem_of(48, sum(sizes), 5120, layout="marlin", epilogue=epilogue)
    few = problem_of(4, sum(sizes), 5120, layout="marlin", epilogue=epilogue)

    assert "more time than a rope takes" in str(planner.stock_reason(rows, A100))
    assert planner.stock_reason(rows, H200) is None
    assert planner.stock_reason(few, A100) is None


def test_norms_that_are_spared_pay_for_wide_tiles() -> None:
    rotation = Rotation(128, 6144, each=True, norm=EPSILON, queries=5120)
    epilogue = Epilogue(rotation=rotation)
    heads = problem_of(48, 7168, 5120, layout="marlin", epilogue=epilogue)
    bare = replace(heads, epilogue=Epilogue())

    inside, own = (
        planner.predict(planner.choose(each, A100), A100).seconds
        for each in (heads, bare)
    )

    assert 2 * OWN_ROPE_SECONDS < inside - own < 18e-6
    assert planner.stock_reason(heads, A100) is None


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


@pytest.mark.parametrize("more", [{"n": 224}, {"n": 128}, {"batch": 2}])
def test_there_are_whole_heads_of_one_product(more: dict[str, Any]) -> None:
    sizes = {"m": 1, "n": 256, "k": 64} | more
    with pytest.raises(ValueError, match="needs one product of whole heads"):
        Problem(**sizes, epilogue=Epilogue(rotation=ROTATION))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"simdgroups_n": 3}, "simdgroups_n=3, reduction='none'"),
        ({"strategy": "split_k", "k_parallel": 2}, "reduction='workspace'"),
    ],
)
def test_a_plan_that_parts_halves_is_refused(
    overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        planner.make(asked(), device=H200, **{"simdgroups_n": 2} | overrides)


def test_a_plan_that_parts_heads_with_norms_is_refused() -> None:
    problem = asked(replace(OF_128, columns=256))
    with pytest.raises(ValueError, match="a multiple of 4 as simdgroups_n"):
        planner.make(problem, device=H200, simdgroups_n=2)


def test_metals_kernels_have_no_rotation() -> None:
    with pytest.raises(ValueError, match=r"rotation=.* needs a CUDA kernel"):
        planner.make(asked(layout="mlx"))


def test_halves_that_are_no_whole_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="32 columns, and heads have 32 features"):
        planner.make(asked(Rotation(32, 64)), device=H200)


def test_the_text_declares_the_rotation_and_reads_its_arrays() -> None:
    plan = planner.choose(asked(parts=PARTS), H200)
    text = source.of_product(plan)

    assert text.name == "marlin_mma_rotated"
    assert text.input_names == ("x", "w", "scales", "positions", "freqs", "numbers")
    assert text.output_names == ("out0", "out1", "out2")
    words = "y rotated in heads of 64 up to column 192 in parts of 128, 64, 64"
    assert words in plan.problem.explain()


def test_the_text_declares_norms_of_heads_and_reads_their_weights() -> None:
    plan = planner.choose(asked(NORMED_HEADS), H200)
    text = source.of_product(plan)

    assert text.name == "marlin_mma_rotated_norms"
    assert text.input_names[3:] == ("positions", "freqs", "q_norm", "k_norm", "numbers")
    assert "column 192, normalized before (eps 4)" in plan.problem.explain()


def test_a_result_with_a_rotation_is_read_as_it_was_written() -> None:
    plan = planner.choose(asked(NORMED_HEADS, PARTS), H200)
    times = {label(plan): 1.0}
    result = Result(
        plan=plan, stock=False, medians_us=times, clock="wall time", date="2026-11-22"
    )
    row = json.loads(json.dumps(measurement.row(result)))
    assert measurement.result(row, registry.plan_type).plan.problem == plan.problem


def asked(
    rotation: Rotation = ROTATION, parts: tuple[int, ...] = (), layout: str = "marlin"
) -> Problem:
    epilogue = Epilogue(rotation=rotation, parts=parts)
    return problem_of(1, ROTATED_N, 1024, layout=layout, epilogue=epilogue)
