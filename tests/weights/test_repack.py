"""Packed weights are moved between layouts, and copied."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin import state
from mlx_marlin.backends.metal.launches import repack_template, repack_tiles
from mlx_marlin.planning.block_plans import REPACK_THREADS
from mlx_marlin.products import packing
from mlx_marlin.products.packing import pack, quantize, to_rows, to_tiles, unpack
from mlx_marlin.weights import layout, tile_conversion
from mlx_marlin.weights.formats import WIDTHS, planes_of
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, launches, strategies
from support.choose import Choose
from support.format_cases import GROUPED, Integers
from support.packed_codes import packed_weights
from support.packed_places import weights_of_tile
from support.profiles import drawn, sampled
from support.strategies import Grouped
from support.trace_mode import emulator_only

GROUP_SIZES = (16, 32, 64, 128)


@cache
def number_of_place(bits: int, group_size: int) -> Integers:
    """Returns the number, 64 * row + k, of each code stored in a plane of a tile."""
    order = layout.order_of_group(group_size)
    places = product(range(layout.tile_words(bits)), range(0, 32, bits))
    codes = (weights_of_tile(bits, order)[place] for place in places)
    return np.array([64 * row + k for row, k in codes])


def tiles_by_table(codes: Integers, bits: int, group_size: int) -> Integers:
    """Returns the tiles of codes [n, k], stored one by one by the layout's table."""
    n, k = codes.shape
    whole = np.zeros(layout.padded(n, k), np.int64)
    whole[:n, :k] = codes
    tiles = whole.reshape(-1, 32, whole.shape[1] // 64, 64).swapaxes(1, 2)
    numbers = tiles.reshape(*tiles.shape[:2], -1)
    planes, low = [], 0
    for own in planes_of(bits):
        stored = numbers[..., number_of_place(own, group_size)] >> low & (1 << own) - 1
        in_word = stored.reshape(*stored.shape[:2], -1, 32 // own)
        planes.append((in_word << np.arange(0, 32, own)).sum(-1))
        low += own
    return np.concatenate(planes, -1)


def any_words(*shape: int, seed: int, offset: int = 0) -> mx.array:
    """Returns random words at an offset, in elements, in their buffer."""
    draw = np.random.default_rng(seed)
    words = draw.integers(0, 2**32, offset + int(np.prod(shape)), dtype=np.uint32)
    return mx.array(words)[offset:].reshape(shape)


@st.composite
def weights(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the shape of a weight: ragged, of several threadgroups, or a batch."""
    group_size = draw(st.sampled_from(GROUP_SIZES))
    step = 64 if group_size == 16 else group_size
    return {
        "bits": draw(st.sampled_from(WIDTHS)),
        "group_size": group_size,
        "n": draw(strategies.sizes(70)),
        "k": step * draw(strategies.sizes(1280 // step)),
        "batch": draw(st.sampled_from([(), (), (1,), (3,), (2, 2)])),
        "seed": draw(st.integers(0, 2**16)),
        "offset": draw(st.sampled_from([0, 0, 1, 3])),
    }


@emulator_only
@drawn(6, weight=weights(), order=st.integers(0, 99))
def test_every_code_goes_to_its_place_and_comes_back_as_by_mlxs_operations(
    weight: dict[str, Any], order: int
) -> None:
    batch, n, bits = weight["batch"], weight["n"], weight["bits"]
    form = {key: weight[key] for key in ("n", "k", "bits", "group_size")}
    width = weight["k"] * bits // 32
    seed, offset = weight["seed"], weight["offset"]
    rows = any_words(*batch, n, width, seed=seed, offset=offset)

    with metal_emulator.emulated(seed=order, trace=True):
        tiles = launches.repack("marlin", **form)(rows)
        stored = any_words(offset, seed=0).tolist() + tiles.flatten().tolist()
        moved = mx.array(stored, mx.uint32)[offset:].reshape(tiles.shape)
        back = launches.repack("mlx", **form)(moved)

    assert mx.array_equal(back, rows)
    codes = format_cases.read_codes(rows.reshape(-1, width), bits)
    expected = [
        tiles_by_table(each, bits, form["group_size"])
        for each in codes.reshape(-1, n, weight["k"])
    ]
    np.testing.assert_array_equal(np.array(tiles).reshape(np.shape(expected)), expected)
    for of_mlx, by_kernel in (
        (to_tiles(rows, **form), tiles),
        (to_rows(tiles, **form), rows),
    ):
        assert (of_mlx.shape, of_mlx.dtype) == (by_kernel.shape, by_kernel.dtype)
        assert mx.array_equal(of_mlx, by_kernel)


@emulator_only
@drawn(3, weight=weights())
def test_padding_of_tiles_never_comes_back(weight: dict[str, Any]) -> None:
    """Whatever it is: a weight is read to the end of its rows and of k."""
    n, k, bits = weight["n"], weight["k"], weight["bits"]
    form = {key: weight[key] for key in ("n", "k", "bits", "group_size")}
    rows = any_words(n, k * bits // 32, seed=weight["seed"])
    padded_n, padded_k = layout.padded(n, k)
    around = any_words(padded_n, padded_k * bits // 32, seed=1)
    around[:n, : k * bits // 32] = rows
    whole = {**form, "n": padded_n, "k": padded_k}

    back = launches.repack("mlx", **form)(launches.repack("marlin", **whole)(around))

    assert mx.array_equal(back, rows)


@pytest.fixture
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_on_gpu", lambda: True)


@sampled(10, 24)
@emulator_only
@pytest.mark.parametrize(("mode", "bits", "group_size"), GROUPED)
def test_pack_and_unpack_give_the_same_weights_by_kernels(
    mode: str, bits: int, group_size: int, request: pytest.FixtureRequest
) -> None:
    step = format_cases.step_of(mode, bits, group_size)
    weight = format_cases.any_weight(
        mode, bits, group_size, 41, 3 * step, dtype="float16", seed=1
    )
    expected = pack(*weight.native, **weight.options)

    request.getfixturevalue("_by_kernels")
    packed = pack(*weight.native, **weight.options)

    assert mx.array_equal(packed.words, expected.words)
    for actual, native in zip(unpack(packed), weight.native, strict=True):
        assert actual.dtype == native.dtype
        assert mx.array_equal(actual.view(mx.uint8), native.view(mx.uint8))


@emulator_only
@pytest.mark.usefixtures("_by_kernels")
@pytest.mark.parametrize(
    "view",
    [
        lambda array: mx.concatenate([array, array], axis=1)[:, : array.shape[1]],
        lambda array: mx.contiguous(array.T).T,
        lambda array: mx.concatenate([array[:1], array])[1:],
    ],
    ids=["columns", "transposed", "offset"],
)
def test_strided_codes_are_moved_as_their_copies(
    view: Callable[[mx.array], mx.array],
) -> None:
    rows = any_words(40, 18, seed=2)
    form = {"n": 40, "k": 192, "bits": 3, "group_size": 64}

    tiles = to_tiles(view(rows), **form)

    assert mx.array_equal(tiles, to_tiles(rows, **form))
    assert mx.array_equal(to_rows(tiles, **form), rows)


@sampled(8)
@emulator_only
@pytest.mark.parametrize("to", ["marlin", "mlx"])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", WIDTHS)
def test_each_word_is_read_and_written_once_in_whole_lines(
    bits: int, group_size: int, to: str
) -> None:
    form = {"n": 64, "k": 2048, "bits": bits, "group_size": group_size}
    rows = any_words(64, 64 * bits, seed=3)
    words = rows if to == "marlin" else to_tiles(rows, **form)

    move = launches.repack(to, **form)
    found = metal_emulator.trace(lambda: mx.eval(move(words)))[0]

    for memory, done in (("w", "read_bytes"), ("out", "written_bytes")):
        traffic = found.of(memory)
        assert getattr(traffic, done) == rows.nbytes
        assert getattr(traffic, f"repeated_{done}") == 0
        assert traffic.lines_128 == rows.nbytes / 128
    assert found.count("barrier") == found.threadgroups
    assert found.threadgroup_bytes <= 21 * 1024


@emulator_only
def test_what_is_not_there_is_not_read() -> None:
    """Rows past n and codes past k: counted, because a stray read need not trap."""
    form = {"n": 33, "k": 2080, "bits": 4, "group_size": 32}
    rows = any_words(33, 260, seed=4)

    found = metal_emulator.trace(
        lambda: mx.eval(launches.repack("marlin", **form)(rows))
    )[0]

    assert found.of("w").read_bytes == rows.nbytes
    assert found.of("out").written_bytes == 2 * 33 * 1024


@pytest.fixture
def _metal(backend: Choose) -> None:
    backend("metal")


def recorded(function: Callable[..., Any], *arrays: mx.array) -> list[dict[str, Any]]:
    """Returns the kernel calls of a graph; MLX records without running it."""
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, function, *arrays)
    return [node for node in nodes if node.get("name") == "CustomKernel"]


@pytest.mark.usefixtures("_metal")
@given(weight=weights())
@settings(max_examples=40)
def test_packing_and_unpacking_are_one_dispatch_on_metal(
    weight: dict[str, Any],
) -> None:
    batch, n, k, bits = (weight[key] for key in ("batch", "n", "k", "bits"))
    form = {key: weight[key] for key in ("n", "k", "bits", "group_size")}
    rows = mx.zeros((*batch, n, k * bits // 32), mx.uint32)
    tiles = mx.zeros((*batch, -(-n // 32), -(-k // 64), 64 * bits), mx.uint32)

    calls = [
        *recorded(lambda w: to_tiles(w, **form), rows),
        *recorded(lambda w: to_rows(w, **form), tiles),
    ]

    assert len(calls) == 2
    order = layout.order_of_group(weight["group_size"])
    template = ", ".join(map(str, repack_template(bits, order).values()))
    of_threadgroup = repack_tiles(bits)
    threads = REPACK_THREADS * -(-k // (64 * of_threadgroup))
    for call, name, made in zip(calls, ("pack", "unpack"), (tiles, rows), strict=True):
        text = call["arguments"][1]
        assert f"marlin_{name}" in call["arguments"][0]
        assert f"<{template}>" in text
        assert space_of("w", text) == "device"
        assert space_of("shape", text) == "constant"
        grid, threadgroup = call["arguments"][2:5], call["arguments"][5:8]
        assert [*grid] == [threads, -(-n // 32), int(np.prod(batch))]
        assert [*threadgroup] == [REPACK_THREADS, 1, 1]
        assert [each[1:] for each in call["outputs"]] == [(made.shape, mx.uint32)]


def space_of(name: str, text: str) -> str:
    """Returns the address space of a buffer in the text that MLX wrote."""
    lines = [each for each in text.splitlines() if f"* {name} [[buffer" in each]
    return "constant" if "constant" in lines[0] else "device"


@pytest.mark.usefixtures("_metal")
def test_pack_and_unpack_are_the_kernels_on_metal() -> None:
    native = mx.zeros((40, 16), mx.uint32), mx.zeros((40, 2)), mx.zeros((40, 2))

    def there_and_back(*arrays: mx.array) -> tuple[mx.array, ...]:
        packed = pack(*arrays)
        assert isinstance(packed, PackedWeight)
        return unpack(packed)

    calls = recorded(there_and_back, *native)

    names = [call["arguments"][0] for call in calls]
    assert ["_pack" in name for name in names] == [True, False]
    assert ["_unpack" in name for name in names] == [False, True]


@pytest.mark.parametrize(
    ("wish", "has_metal", "default", "expected"),
    [
        ("metal", False, mx.cpu, True),
        ("emulator", False, mx.cpu, False),
        ("stock", True, mx.gpu, False),
        (None, True, mx.gpu, True),
        (None, True, mx.cpu, False),
        (None, False, mx.gpu, False),  # CUDA
    ],
)
def test_the_kernels_move_codes_where_metal_does(
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    wish: str | None,
    has_metal: bool,
    default: mx.DeviceType,
    expected: bool,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
    backend(wish)

    assert packing._on_gpu() is expected


def test_operations_are_compared_once_a_shape_outside_of_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong conversion by MLX is told, and a right one not computed twice."""
    state.reset()
    read, is_wrong = [], False
    back, convert = tile_conversion.rows_of_tiles, tile_conversion.tiles_of_rows

    def rows(*arguments: Any, **form: int) -> mx.array:
        read.append(form["bits"])
        return back(*arguments, **form)

    def tiles(*arguments: Any, **form: int) -> mx.array:
        return convert(*arguments, **form) ^ is_wrong

    monkeypatch.setattr(tile_conversion, "rows_of_tiles", rows)
    monkeypatch.setattr(tile_conversion, "tiles_of_rows", tiles)

    def move(n: int, bits: int = 4) -> mx.array:
        return to_tiles(any_words(n, 2 * bits, seed=n), n, 64, bits=bits, group_size=32)

    form = {"bits": 4, "group_size": 32}
    mx.eval(mx.compile(lambda w: to_tiles(w, 40, 64, **form))(any_words(40, 8, seed=1)))
    read.clear()
    for n, bits, compared in (
        (40, 4, [4]),  # a trace has compared nothing
        (40, 4, []),
        (41, 4, [4]),
        (40, 8, [8]),
        (41, 4, []),
    ):
        move(n, bits)
        assert read == compared, (n, bits)
        read.clear()
    is_wrong = True
    with pytest.raises(RuntimeError, match="changed its codes"):
        move(42)
    with pytest.raises(RuntimeError, match="changed its codes"):
        move(42)


Copy = Callable[[PackedWeight], PackedWeight]
COPIES: dict[str, Copy] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "pickle, protocol 2": lambda packed: pickle.loads(pickle.dumps(packed, protocol=2)),
}
copies = pytest.mark.parametrize("how", COPIES)
N = 40


def _of_format(grouped: Grouped) -> PackedWeight:
    k = 2 * format_cases.step_of(*grouped)
    return packed_weights(grouped, n=N, k=k, dtype="bfloat16")[0]


def with_global_scale() -> PackedWeight:
    w = mx.random.normal((N, 128), key=mx.random.key(1))
    return quantize(w, mode="nvfp4", global_scale=mx.abs(w).max())


def assert_equal(found: PackedWeight, expected: PackedWeight) -> None:
    assert type(found) is PackedWeight
    for each in fields(PackedWeight):
        ours, theirs = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(theirs, mx.array):
            assert ours.dtype == theirs.dtype
            assert mx.array_equal(
                ours[..., None].view(mx.uint8), theirs[..., None].view(mx.uint8)
            )
        else:
            assert ours == theirs


WEIGHTS: dict[str, Callable[[], PackedWeight]] = {
    "global scale": with_global_scale,
    "batch": lambda: packed_weights(("zero_point", 3, 64), 3, n=N, k=128)[0],
    **{grouped[0]: partial(_of_format, grouped) for grouped in GROUPED},
}
"""A weight of every mode, and what is not part of a format."""


@copies
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_copy_is_equal(how: str, kind: str) -> None:
    packed = WEIGHTS[kind]()

    found = COPIES[how](packed)

    assert found is not packed
    assert_equal(found, packed)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_deep_copy_does_not_see_changes(how: str) -> None:
    packed = with_global_scale()
    found, before = COPIES[how](packed), replace(packed)
    kept = [mx.array(each) for each in (packed.words, packed.scales)]
    assert packed.global_scale is not None

    packed.words[:] = 0
    packed.scales[:] = 0
    packed.global_scale[...] = 0

    assert found.global_scale is not None
    assert found.global_scale.item() != 0
    assert mx.array_equal(found.words, kept[0])
    assert mx.array_equal(found.scales, kept[1])
    assert mx.all(before.words == 0)  # `replace` shares arrays, so this would show


def test_a_shallow_copy_shares_its_arrays() -> None:
    packed = with_global_scale()

    found = copy.copy(packed)

    assert found.words is packed.words
    assert found.scales is packed.scales
    assert found.global_scale is packed.global_scale


def test_equal_weights_in_one_deep_copy_stay_one() -> None:
    packed = with_global_scale()

    first, second = copy.deepcopy([packed, packed])

    assert first is second
