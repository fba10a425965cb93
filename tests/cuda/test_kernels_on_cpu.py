"""The CUDA kernels' text on the CPU, where there is neither a GPU nor a CUDA compiler.

What runs is `shaders/cuda` as it is launched, less single instructions: see
`cuda_on_cpu.py`. A covering set of formats; the profile `every` runs all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from metal_emulator import emulated
from mlx_marlin.backends import devices, selection
from mlx_marlin.backends.cuda import cost, limits
from mlx_marlin.backends.source import OPERANDS
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.formats import FORMATS
from support import cuda_cases, launches, oracles
from support.choose import Choose
from support.cuda_cases import (
    EPILOGUES,
    RING_WAYS,
    ROWS,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
    Case,
)
from support.cuda_on_cpu import check, check_decoded, check_order, plan_of, run
from support.cuda_products import Product
from support.format_cases import arguments, layouts_of
from support.marks import needs_emulator
from support.oracles import Floats, exact
from support.profiles import sampled

pytestmark = [needs_emulator, pytest.mark.usefixtures("on_cpu")]

WHOLE, SPLIT = WAYS[0], WAYS[3]
WHOLES = (WHOLE, WGMMA_WAYS[0], STAGED_WAYS[0])
SPLITS = (SPLIT, WGMMA_WAYS[3], STAGED_WAYS[3])
EVERYTHING = Epilogue(bias=True, activation="gelu", multiply=True, residual=True)
PARTS = EPILOGUES[-1]


def every_case() -> Iterator[Case]:
    """Yields every format in every layout and dtype, and with each the next of rest."""
    rows, configs = cycle(ROWS), cycle(WAYS)
    formats = dict.fromkeys(case[:3] for case in cuda_cases.cases())
    for (mode, bits, group_size), dtype in product(formats, limits.DTYPES):
        for layout in layouts_of(mode, bits, group_size):
            yield mode, bits, group_size, layout, dtype, next(rows), next(configs)


def facts(case: Case) -> set[object]:
    """Returns what a covering set has to meet."""
    mode, bits, group_size, layout, dtype, m, way = case
    codes = FORMATS[mode, bits].codes
    group = {32: "step 32", 128: "pairs of tiles"}.get(group_size, "step 64")
    return {
        (mode, bits, layout),
        (codes, bits, dtype),
        (codes, group_size, layout),
        (bits, group, layout),
        (group_size, dtype),
        ("fragments", -(-m // 8), layout),
        ("way", WAYS.index(way), dtype),
    }


@pytest.mark.parametrize("way", [*WAYS, *RING_WAYS], ids=str)
def test_all_ways_but_data_parallel_split_tiles(way: dict[str, Any]) -> None:
    plan = plan_of(("affine", 4, 64, "marlin", "float16", 12, way))
    splits = Counter(
        split.tile
        for threadgroup in range(plan.num_threadgroups)
        for split in plan.work.splits(threadgroup)
    )
    assert (max(splits.values()) > 1) == (plan.strategy != "data_parallel")


@sampled(3)
@pytest.mark.parametrize("case", cuda_cases.covering(every_case(), facts), ids=str)
def test_formats(case: Case) -> None:
    check(case)


DTYPES_AND_ROWS = (("float16", 7), ("bfloat16", 40))
OF_RINGS = (("float16", 19), ("bfloat16", 12))


@sampled(3)
@pytest.mark.parametrize(
    ("way", "dtype", "m"),
    [
        *((way, dtype, m) for way in WAYS for dtype, m in DTYPES_AND_ROWS),
        *((way, *each) for way, each in zip(RING_WAYS, cycle(OF_RINGS), strict=False)),
        *((SPLITS[1], "float16", 40), (SPLITS[1], "bfloat16", 26)),
        *((SPLITS[2], "float16", 30), (SPLITS[2], "bfloat16", 7)),
    ],
    ids=str,
)
def test_integers_are_exact_and_added_in_ascending_k(
    way: dict[str, Any], dtype: str, m: int
) -> None:
    case: Case = ("affine", 4, 64, "marlin", dtype, m, way)
    weight, x, expected = cuda_cases.integers(dtype, m, way)
    y = run(plan_of(case), x, weight)
    assert np.array_equal(exact(y), expected)
    check_order(case)


@pytest.mark.parametrize("m", [1, 8])
def test_the_largest_block(m: int) -> None:
    case: Case = ("affine", 4, 128, "marlin", "float16", m, cuda_cases.WIDE)
    assert check(case).threads == 896


@pytest.fixture
def chosen(on_cpu: None, backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves as on a machine with CUDA where nobody forces a back end."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    # Not Hopper: what its kernel has in shared memory is more than the emulator's.
    older = replace(cuda_cases.h200(), arch="sm_80")
    monkeypatch.setattr(devices, "current", lambda *_: older)
    monkeypatch.setattr(cost, "DECODE_SECONDS", 0.0)  # so small a weight is never
    backend(None)
    assert selection.backend() == "cuda"


MANY = 150
CALLS: dict[str, tuple[Callable[..., mx.array], Callable[..., Floats]]] = {
    "nothing": (lambda x, w, _: mlx_marlin.linear(x, w), lambda y, _: y),
    "bias": (
        lambda x, w, bias: mlx_marlin.linear(x, w, bias=bias),
        lambda y, bias: y + bias,
    ),
    "silu": (
        lambda x, w, _: mlx_marlin.linear(x, w, activation="silu"),
        lambda y, _: y / (1 + np.exp(-y)),
    ),
    "two results": (
        lambda x, w, _: side_by_side(*mlx_marlin.linears(x, w, parts=(72, 128))),
        lambda y, _: y,
    ),
}


def side_by_side(first: mx.array, second: mx.array) -> mx.array:
    assert (first.shape[1], second.shape[1]) == (72, 128)
    return mx.concatenate([first, second], axis=1)


@sampled(4)
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("m", [12, MANY])
@pytest.mark.parametrize("call", CALLS)
def test_who_asks_for_nothing_gets_the_numbers(m: int, call: str) -> None:
    weight, x = cuda_cases.draw(("affine", 4, 64, "marlin", "float16", m, {}))
    packed = pack(*weight.native, **weight.options)
    bias = cuda_cases.operands(m)[0]
    linear, expected = CALLS[call]

    assert mlx_marlin.why_not(x, packed) is None
    y = linear(x, packed, bias)

    right = expected(exact(x) @ weight.decoded.T, exact(bias))
    assert oracles.error(y, right) < oracles.TOLERANCES["float16"]


@sampled(2)
@pytest.mark.parametrize("way", [*WHOLES, *SPLITS], ids=str)
@pytest.mark.parametrize("epilogue", [EVERYTHING, PARTS], ids=Epilogue.explain)
def test_epilogues(way: dict[str, Any], epilogue: Epilogue) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 19, way)
    assert check(case, epilogue=epilogue).needs_second_pass == (way in SPLITS)


MATRICES = ("x", "multiplier", "residual")


@pytest.mark.parametrize("way", [WHOLE, SPLIT], ids=str)
def test_rows_stand_in_any_shape(way: dict[str, Any]) -> None:
    case: Case = ("affine", 4, 64, "marlin", "float16", 12, way)
    product = Product(case, epilogue=EVERYTHING)
    plan = plan_of(case, **product.options)

    y = product.run(plan, lambda array: array.reshape(2, 6, -1), MATRICES)()

    assert y.shape == (2, 6, cuda_cases.N)
    expected = product.run(plan)()
    assert mx.array_equal(y.reshape(expected.shape), expected)


@sampled(2)
@pytest.mark.parametrize(
    ("layout", "way", "m"),
    [
        *product(("marlin", "mlx"), (WHOLE, SPLIT), (5,)),
        *product(("marlin",), (*WHOLES[1:], *SPLITS[1:]), (10,)),
    ],
    ids=str,
)
def test_batches(layout: str, way: dict[str, Any], m: int) -> None:
    case: Case = ("affine", 4, 64, layout, "float16", m, way)
    plan = check(case, batch=3)
    if way in (WHOLE, SPLIT):
        assert plan.needs_second_pass == (way is SPLIT)


EACH_OPERAND = (OPERANDS, ("x",), ("w",), ("scales",))


@sampled(3, 9)
@pytest.mark.parametrize(
    ("layout", "bits", "m", "way", "moved"),
    [
        *product(("marlin",), (3, 4, 8), (6,), (WHOLE,), EACH_OPERAND),
        *product(
            *(("mlx",), (3, 4, 8), (6,), (WHOLE,)),
            (OPERANDS, *zip(OPERANDS, strict=True)),
        ),
        *(
            ("marlin", bits, m, way, moved)
            for bits, m, way in (
                *((3, 12, WHOLES[1]), (8, 36, WHOLES[1])),
                *((4, 20, WHOLES[2]), (4, 30, WHOLES[2])),
            )
            for moved in EACH_OPERAND
        ),
    ],
    ids=str,
)
def test_arrays_may_begin_anywhere(
    layout: str, bits: int, m: int, way: dict[str, Any], moved: tuple[str, ...]
) -> None:
    check(("affine", bits, 64, layout, "float16", m, way), names=moved)


@sampled(2)
@pytest.mark.parametrize(
    ("layout", "way"), [("mlx", SPLIT), *(("marlin", way) for way in SPLITS)], ids=str
)
def test_a_global_scale(layout: str, way: dict[str, Any]) -> None:
    check(("nvfp4", 4, 16, layout, "float16", 10, way), global_scale=True)


def decoding_facts(case: Case) -> set[object]:
    mode, bits, group_size, layout, dtype, _, _ = case
    group = group_size if group_size == 16 else group_size == 32
    return {(bits, layout, group), (FORMATS[mode, bits].codes, dtype), group_size}


@sampled(2)
@pytest.mark.parametrize(
    "case", cuda_cases.covering(every_case(), decoding_facts), ids=str
)
def test_a_decoded_weight_is_rounded_once(case: Case) -> None:
    weight, _ = cuda_cases.draw(case)
    plan = dequantize_plan(plan_of(case).problem)
    arrays = arguments(weight, case[3])
    y, expected = exact(launches.dequantized(plan)(*arrays)), weight.decoded
    rounding = oracles.ROUNDING[case[4]] * np.abs(expected)
    assert np.all(np.abs(y - expected) <= rounding + oracles.SMALLEST[case[4]])


@sampled(2)
@pytest.mark.parametrize("layout", ["marlin", "mlx"])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_weight_is_decoded_in_blocks(layout: str, transposed: bool) -> None:
    check_decoded(("nvfp4", 4, 16, layout, "float16", 10, WHOLE), transposed)


OF_RACES = ((4, 32, 12), (6, 128, 28), (4, 128, 20))


@sampled(2, 12)
@pytest.mark.parametrize(
    ("layout", "dtype", "bits", "group_size", "m", "way"),
    [
        *product(("marlin", "mlx"), ("float16",), (4,), (32,), (12,), (WHOLE, SPLIT)),
        *(
            ("marlin", "float16", *each, way)
            for way, each in zip(RING_WAYS, cycle(OF_RACES), strict=False)
        ),
        # Loaders bring halves.
        *product(("marlin",), ("bfloat16",), (4,), (32, 128), (40,), (SPLITS[1],)),
    ],
    ids=str,
)
def test_no_race_and_nothing_read_that_is_not_there(
    layout: str, dtype: str, bits: int, group_size: int, m: int, way: dict[str, Any]
) -> None:
    with emulated(trace=True):
        check(("affine", bits, group_size, layout, dtype, m, way))
