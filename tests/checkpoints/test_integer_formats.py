"""GPTQ, AWQ and compressed-tensors are read without rounding."""

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_marlin import unpack
from mlx_marlin.checkpoints.formats import integers
from mlx_marlin.checkpoints.reading import read_checkpoint
from mlx_marlin.weights.bit_streams import codes_of_words, words_of_codes
from support import foreign_checkpoints as foreign
from support.profiles import drawn

LAYER = "model.layers.0.mlp.up_proj"


def read(folder: foreign.Folder) -> dict:
    with tempfile.TemporaryDirectory() as path:
        read = dict(read_checkpoint(folder.write(Path(path))))
        mx.eval([v for v in read.values() if isinstance(v, mx.array)])
        for value in read.values():
            if not isinstance(value, mx.array):
                mx.eval(value.words, value.scales)
    return read


def assert_same(read: dict, weight: foreign.IntegerWeight) -> None:
    """The same integers and scales, in the order that `input_order` tells."""
    packed = read[f"{LAYER}.weight"]
    order = read.get(f"{LAYER}.input_order")
    order = np.arange(packed.k) if order is None else np.array(order)
    assert sorted(order) == [*range(packed.k)]
    words, scales, *zeros = unpack(packed)
    np.testing.assert_array_equal(
        np.array(codes_of_words(words, packed.bits)), weight.codes[:, order]
    )
    groups = weight.groups_of_columns[order]
    # Groups of the packed weight are runs of columns.
    np.testing.assert_array_equal(groups, np.arange(packed.k) // packed.group_size)
    np.testing.assert_array_equal(np.array(scales), weight.scales)
    if packed.mode == "symmetric":
        assert (weight.zeros == 2 ** (packed.bits - 1)).all()
    else:
        np.testing.assert_array_equal(np.array(zeros[0]), weight.zeros)


def shapes(widths: tuple[int, ...], n_multiple: int) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "n": st.integers(1, 5).map(lambda tiles: tiles * n_multiple),
            "groups": st.integers(1, 5),
            "group_size": st.sampled_from((64, 128)),
            "bits": st.sampled_from(widths),
            "symmetric": st.booleans(),
            "act_order": st.booleans(),
            "seed": st.integers(0, 2**32 - 1),
        }
    )


def weight_of(call: dict, **options: int) -> foreign.IntegerWeight:
    return foreign.drawn_weight(
        np.random.default_rng(call["seed"]),
        call["n"],
        call["groups"] * call["group_size"],
        call["group_size"],
        call["bits"],
        symmetric=call["symmetric"],
        act_order=call["act_order"],
        **options,
    )


@drawn(60, call=shapes((2, 3, 4, 8), 32), version=st.sampled_from((1, 2)))
def test_gptq_is_read_exactly(call: dict, version: int) -> None:
    weight = weight_of(call, least_zero=2 - version)
    folder = foreign.Folder(
        foreign.gptq_config(call["bits"], version, group_size=call["group_size"]),
        foreign.gptq_arrays(LAYER, weight, version),
    )
    assert_same(read(folder), weight)


@drawn(60, call=shapes((4,), 8))
def test_awq_is_read_exactly(call: dict) -> None:
    weight = weight_of({**call, "act_order": False})
    config = foreign.awq_config(group_size=call["group_size"])
    folder = foreign.Folder(config, foreign.awq_arrays(LAYER, weight))
    assert_same(read(folder), weight)


VERSIONS = ("0.18", "0.17", "0.9")


@drawn(60, call=shapes((2, 3, 4, 5, 6, 8), 1), version=st.sampled_from(VERSIONS))
def test_compressed_tensors_are_read_exactly(call: dict, version: str) -> None:
    weight = weight_of(call)
    said = {name: call[name] for name in ("bits", "group_size", "symmetric")}
    folder = foreign.Folder(
        foreign.compressed_config(**said),
        foreign.compressed_arrays(
            LAYER, weight, symmetric=call["symmetric"], version=version
        ),
    )
    assert_same(read(folder), weight)


@pytest.mark.parametrize("zero", [-5, 4, 127, -128])
def test_a_zero_point_that_is_no_code_is_refused(zero: int) -> None:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 3)
    arrays = foreign.compressed_arrays(LAYER, weight, symmetric=False, version="0.9")
    arrays[f"{LAYER}.weight_zero_point"][3, 1] = zero
    with pytest.raises(ValueError, match=rf"{zero}.*expected -4 to 3 for 3 bits"):
        read(foreign.Folder(foreign.compressed_config(3), arrays))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_codes_of_seven_bits_keep_their_values_in_eight(
    symmetric: bool, version: str
) -> None:
    rng = np.random.default_rng(0)
    weight = foreign.drawn_weight(rng, 40, 256, 64, 7, symmetric=symmetric)
    folder = foreign.Folder(
        foreign.compressed_config(7, symmetric=symmetric),
        foreign.compressed_arrays(LAYER, weight, symmetric=symmetric, version=version),
    )
    packed = read(folder)[f"{LAYER}.weight"]
    words, _, zeros = unpack(packed)
    assert (packed.bits, packed.mode) == (8, "zero_point")
    np.testing.assert_array_equal(np.array(codes_of_words(words, 8)), weight.codes)
    np.testing.assert_array_equal(np.array(zeros), weight.zeros)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_that_tools_read_differently_is_refused(bits: int) -> None:
    rng = np.random.default_rng(0)
    weight = foreign.drawn_weight(rng, 32, 128, 128, bits, least_zero=1)
    weight.zeros[5] = 2**bits  # stored as 2^bits - 1
    folder = foreign.Folder(
        foreign.gptq_config(bits, 1, group_size=-1),
        foreign.gptq_arrays(LAYER, weight, 1),
    )
    with pytest.raises(ValueError, match=rf"up_proj.*a zero point is {2**bits}, expec"):
        read(folder)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("tools", "is_read"),
    [
        (["gptqmodel:7.7.0"], True),
        ("GPTQModel:0.9.1", True),
        (["autogptq:1.0", "gptqmodel:1.0.0-dev"], True),
        (["gptqmodel:0.8.3"], False),
        ({"gptqmodel": 7}, False),
        (None, False),
    ],
)
def test_zero_points_of_zero_are_read_from_what_gptqmodel_wrote(
    bits: int, tools: object, is_read: bool
) -> None:
    weight = foreign.drawn_weight(np.random.default_rng(bits), 64, 512, 64, bits)
    weight.zeros[::3] = 0
    arrays = foreign.gptq_arrays(LAYER, weight, 2)
    words = arrays[f"{LAYER}.qzeros"].view(np.uint32)
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    arrays[f"{LAYER}.qzeros"] = (words - ones).view(np.int32)  # borrows
    config = foreign.gptq_config(bits, 1)
    config["quantization_config"]["meta"] = {"quantizer": tools}
    folder = foreign.Folder(config, arrays)
    if is_read:
        assert_same(read(folder), weight)
    else:
        with pytest.raises(ValueError, match="a zero point is"):
            read(folder)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_columns_are_reordered_in_chunks_of_rows(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = 70, 96
    monkeypatch.setattr(integers, "CHUNK_CODES", 32 * k)
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (n, k), dtype=np.uint8)
    order = rng.permutation(k).astype(np.int32)
    words = words_of_codes(mx.array(codes), bits)
    turned = mx.contiguous(words.T).T  # as in GPTQ's files
    for given_words in (words, turned):
        result = integers.reordered(given_words, mx.array(order), bits)
        np.testing.assert_array_equal(
            np.array(codes_of_words(result, bits)), codes[:, order]
        )


def test_chunks_are_reordered_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, k, bits = 8192, 1024, 4
    monkeypatch.setattr(integers, "CHUNK_CODES", 512 * k)
    words = mx.zeros((n, k * bits // 32), mx.uint32)
    order = mx.arange(k, dtype=mx.int32)[::-1]
    mx.eval(words, order)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(integers.reordered(words, order, bits))
    assert mx.get_peak_memory() - before < 4 * words.nbytes


@pytest.mark.parametrize(
    ("part", "place", "value", "message"),
    [
        ("g_idx", 0, 1, r"up_proj.*g_idx has groups of 63 to 65"),
        ("g_idx", 5, 2, "g_idx from 0 to 2, expected 0 to 1"),
        ("scales", (1, 3), np.inf, "a scale is NaN or infinite"),
    ],
)
def test_arrays_that_are_no_weight_are_refused(
    part: str, place: object, value: float, message: str
) -> None:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, 128, 64, 4)
    arrays = foreign.gptq_arrays(LAYER, weight, 2)
    arrays[f"{LAYER}.{part}"][place] = value
    with pytest.raises(ValueError, match=message):
        read(foreign.Folder(foreign.gptq_config(4, 2), arrays))
