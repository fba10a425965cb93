"""What a config says of quantized layers is used, contradicted or does not matter."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import AwqConfig, GPTQConfig

from mlx_marlin import dequantize
from mlx_marlin.checkpoints.formats.integers import Scheme
from mlx_marlin.checkpoints.location import check_files
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.reading import PARTS, read_checkpoint
from mlx_marlin.checkpoints.settings import KEYS
from support import foreign_checkpoints as foreign
from support.one_layer import (
    LAYER,
    auto_round,
    awq,
    compressed,
    drawn,
    gptq,
    modelopt,
    nvfp4,
    settings_of,
    stock,
)
from support.profiles import profile, sampled

VALUES = (0, 1, -1, 5, 2**40, "x", 1.5, [], {}, [1], {"a": 1}, True, False)
"""Of every type of JSON, and numbers that no setting or many settings have."""
DELETED = object()


CHECKPOINTS = [gptq, awq, compressed, nvfp4, modelopt, stock]
Checkpoint = Callable[[], foreign.Folder]


def values(
    folder: foreign.Folder, path: Path, *, rewritten: bool = True
) -> dict[str, np.ndarray]:
    """All arrays, and the numbers of packed weights."""
    if rewritten:
        folder.write(path)
    (path / "config.json").write_text(json.dumps(folder.config))
    read = dict(read_checkpoint(path))
    return {
        name: np.array(
            value if isinstance(value, mx.array) else dequantize(value, mx.float32)
        )
        for name, value in read.items()
    }


def outcome(
    folder: foreign.Folder, path: Path, original: dict, *, rewritten: bool = True
) -> str:
    """Returns "same", "other", or the message of a refusal."""
    try:
        read = values(folder, path, rewritten=rewritten)
    except ValueError as error:
        return str(error)
    if read.keys() != original.keys():
        return "other"
    same = (np.array_equal(read[name], original[name]) for name in read)
    return "same" if all(same) else "other"


def places(settings: dict, *path: str) -> Iterator[tuple[str, ...]]:
    """Yields the path of every key of an object, and of one that is not there."""
    yield (*path, "unheard_of")
    for key, value in settings.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, *path, key)


@sampled(2, 6)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_no_change_of_a_key_gives_other_weights(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    usual = checkpoint()
    original = values(usual, tmp_path)
    changed = refused = 0
    # Each key has values of every sort in the other profiles too.
    step = {"quick": 3, "full": 2}.get(profile(), 1)
    for index, place in enumerate(places(settings_of(usual))):
        for value in (*VALUES[index % step :: step], None, DELETED):
            folder = foreign.Folder(copy.deepcopy(usual.config))
            inner = settings_of(folder)
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            if value is DELETED:
                del inner[place[-1]]
            found = outcome(folder, tmp_path, original, rewritten=False)
            says_nothing = value is None or value is DELETED
            if place[-1] == "checkpoint_format" and says_nothing:
                assert found == "other"  # version 1, as in every tool
                continue
            assert found == "same" or str(tmp_path) in found, (place, value)
            changed += 1
            refused += found != "same"
    assert refused > changed // 4


LONG = {
    "text": "x" * 5_000,
    "list": [*range(900)],
    "object": {str(key): {"bits": 4} for key in range(200)},
    "key": 3,
}


@pytest.mark.parametrize("sort", LONG)
@pytest.mark.parametrize("checkpoint", [*CHECKPOINTS, auto_round])
def test_no_message_quotes_more_than_200_letters_of_a_value(
    tmp_path: Path, checkpoint: Checkpoint, sort: str
) -> None:
    usual = checkpoint()
    usual.write(tmp_path)
    refused = 0
    for place in places(usual.config):
        folder = checkpoint()
        inner = folder.config
        for key in place[:-1]:
            inner = inner[key]
        key = "y" * 5_000 if sort == "key" else place[-1]
        inner[key] = LONG[sort]
        found = outcome(folder, tmp_path, {}, rewritten=False)
        refused += found not in ("same", "other")
        assert len(found.replace(str(tmp_path), "")) < 800, (place, found[:1000])
    assert refused > 1


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "awq",
        "method": "awq",
        "format": "gptq",
        "checkpoint_format": "marlin",
        **dict.fromkeys(("bits", "w_bit", "wbits"), 8),
        **dict.fromkeys(("group_size", "q_group_size"), 32),
        "sym": True,
        "desc_act": False,
        "dynamic": {"+:.*": {"unheard_of": 1}},
    },
    "awq": {
        "quant_method": "gptq",
        "method": "gptq",
        **dict.fromkeys(("version", "format", "checkpoint_format"), "gemv"),
        **dict.fromkeys(("bits", "w_bit", "wbits"), 8),
        **dict.fromkeys(("group_size", "q_group_size"), 32),
        "zero_point": False,
        "dynamic": {"+:.*": {"unheard_of": 1}},
    },
    "compressed-tensors": {
        "quant_method": "gptq",
        "format": "float-quantized",
        "config_groups": {},
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "modelopt": {"quant_method": "gptq", "quant_algo": "FP8", "group_size": 32},
    "mlx": {"bits": 3, "group_size": 32, "mode": "mxfp4"},
    "group": {"weights": None, "format": "marlin-24"},
    "weights": {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": 32,
        "strategy": "channel",
        "actorder": None,
    },
}
GROUP = ("config_groups", "group_0")
NEUTRAL: dict[str, Any] = {"backend": "llm-awq", "pack_dtype": "int16"}


@pytest.mark.parametrize(
    ("checkpoint", "name", "place"),
    [
        (gptq, "gptq", ()),
        (awq, "awq", ()),
        (compressed, "compressed-tensors", ()),
        (compressed, "group", GROUP),
        (compressed, "weights", (*GROUP, "weights")),
        (modelopt, "modelopt", ()),
        (stock, "mlx", ()),
    ],
)
def test_every_key_that_is_used_can_be_contradicted(
    tmp_path: Path, checkpoint: Checkpoint, name: str, place: tuple[str, ...]
) -> None:
    wrong = CONTRADICTIONS[name]
    neutral = {key: NEUTRAL.get(key, "x") for key in KEYS[name].neutral}
    assert {*wrong} == KEYS[name].used - {"meta"}  # of which other tests tell
    for key, value in (wrong | neutral).items():
        folder = checkpoint()
        inner = settings = settings_of(folder)
        for part in place:
            inner = inner[part]
        inner[key] = value
        if name == "compressed-tensors" and key == "format":
            del settings["config_groups"]["group_0"]["format"]
        if name == "mlx":
            del settings[LAYER]
        with pytest.raises(ValueError, match=tmp_path.name):
            values(folder, tmp_path)


@pytest.mark.parametrize("checkpoint", [gptq, awq, compressed, modelopt])
def test_keys_that_do_not_matter_may_say_anything(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = checkpoint()
    original = values(folder, tmp_path)
    settings = settings_of(folder)
    for key in KEYS[settings["quant_method"]].irrelevant:
        settings[key] = {"x": 5}
    assert outcome(folder, tmp_path, original) == "same"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_an_array_that_is_missing_is_named(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = checkpoint()
    for name in folder.arrays:
        arrays = {each: a for each, a in folder.arrays.items() if each != name}
        part = name.rpartition(".")[2]
        with pytest.raises(ValueError, match=rf"{LAYER}\.|{part}") as error:
            values(foreign.Folder(folder.config, arrays), tmp_path)
        said = part.removesuffix("es")  # "biases for mode"
        assert said in str(error.value)


def test_all_arrays_that_readers_know_are_in_these_checkpoints() -> None:
    written = {name.rpartition(".")[2] for c in CHECKPOINTS for name in c().arrays}
    known = {part for parts in PARTS.values() for part in parts}
    assert known - written == {"global_scale", "input_global_scale", "input_scale"}


SYMMETRIC: dict[str, Callable[[], foreign.Folder]] = {
    "gptq": lambda: foreign.Folder(
        foreign.gptq_config(4, 1, sym=True, desc_act=False),
        foreign.gptq_arrays(LAYER, drawn(4, symmetric=True), 1),
    ),
    "awq": lambda: foreign.Folder(
        foreign.awq_config(zero_point=False),
        foreign.awq_arrays(LAYER, drawn(4, symmetric=True)),
    ),
    "compressed": lambda: foreign.Folder(
        foreign.compressed_config(3, symmetric=True, actorder=None),
        foreign.compressed_arrays(LAYER, drawn(3, symmetric=True), symmetric=False),
    ),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_weights_need_no_zero_points_and_no_order(
    tmp_path: Path, name: str
) -> None:
    folder = SYMMETRIC[name]()
    original = values(folder, tmp_path)
    (zeros,) = (a for a in folder.arrays if "zero" in a)
    folder.arrays[zeros] = folder.arrays[zeros].copy()
    folder.arrays[zeros][0, 0] ^= 1
    with pytest.raises(ValueError, match=rf"zero points '{zeros}' from .* symmetric"):
        values(folder, tmp_path)
    for array in [*folder.arrays]:
        if array == zeros or array.endswith("g_idx"):
            del folder.arrays[array]
    assert outcome(folder, tmp_path, original) == "same"


def test_symmetric_weights_with_the_middle_itself_in_version_1(tmp_path: Path) -> None:
    original = values(SYMMETRIC["gptq"](), tmp_path)
    folder = SYMMETRIC["gptq"]()
    zeros = f"{LAYER}.qzeros"
    folder.arrays[zeros] = np.full_like(folder.arrays[zeros], 0x88888888 - 2**32)
    assert outcome(folder, tmp_path, original) == "same"


@pytest.mark.parametrize(
    "said",
    [
        {"checkpoint_format": None, "format": "gptq_v2"},
        {"checkpoint_format": None, "format": "GPTQ_v2"},
        {"format": "gptq_v2"},
        {"quant_method": None, "method": "gptq"},
        {"bits": None, "w_bit": 4},
    ],
)
def test_keys_have_several_names(tmp_path: Path, said: dict) -> None:
    original = values(gptq(), tmp_path)
    assert outcome(gptq(**said), tmp_path, original) == "same"


NAMES = ("bits", "group_size", "sym", "desc_act", "checkpoint_format")
OF_GPTQ = {key: settings_of(gptq())[key] for key in NAMES}
OF_AWQ = {"bits": 4, "group_size": 64, "zero_point": True}
OF_AUTOAWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("checkpoint", "said", "file"),
    [
        (gptq, GPTQConfig(**OF_GPTQ).to_dict(), ""),
        (awq, AwqConfig(**OF_AWQ).to_dict(), ""),
        (awq, OF_AUTOAWQ, "quant_config.json"),
    ],
)
def test_configs_of_other_tools_are_known(
    tmp_path: Path, checkpoint: Checkpoint, said: dict, file: str
) -> None:
    """AutoAWQ has its own file."""
    folder = checkpoint()
    original = values(folder, tmp_path)
    folder.config["quantization_config"] = said
    if file:
        (tmp_path / file).write_text(json.dumps(said))
        del folder.config["quantization_config"]
    assert outcome(folder, tmp_path, original) == "same"


@pytest.mark.parametrize("place", ["quantize_config.json", "text_config"])
@pytest.mark.parametrize("checkpoint", [gptq, awq, compressed, modelopt])
def test_settings_may_be_elsewhere(
    tmp_path: Path, checkpoint: Checkpoint, place: str
) -> None:
    folder = checkpoint()
    original = values(folder, tmp_path / "usual")
    settings = folder.config.pop("quantization_config")
    if place == "text_config":
        folder.config["text_config"] = {"quantization_config": settings}
    else:
        (tmp_path / place).write_text(json.dumps(settings))
    assert outcome(folder, tmp_path, original) == "same"


def test_two_files_of_settings_are_united(tmp_path: Path) -> None:
    original = values(gptq(), tmp_path / "usual")
    own = tmp_path / "quantize_config.json"
    own.write_text('{"checkpoint_format": "gptq_v2", "damp_percent": 0.5}')
    assert outcome(gptq(checkpoint_format=None), tmp_path, original) == "same"
    own.write_text('{"checkpoint_format": "gptq_v2"}')
    found = outcome(gptq(checkpoint_format="gptq"), tmp_path, original)
    assert "quantize_config.json" in found
    assert "checkpoint_format" in found


def test_layers_may_have_a_scheme_of_their_own(tmp_path: Path) -> None:
    weight = drawn(8)
    arrays = gptq().arrays | foreign.gptq_arrays("lm_head", weight, 2)
    own = {"bits": 8, "damp_percent": 0.5}
    config = foreign.gptq_config(4, 2, dynamic={"+:lm_head": own})
    read = values(foreign.Folder(config, arrays), tmp_path)
    np.testing.assert_array_equal(read["lm_head.weight"], weight.values.astype("f4"))
    config = foreign.gptq_config(4, 2)
    with pytest.raises(ValueError, match=r"'lm_head\.weight'.* says 4 bits in groups"):
        values(foreign.Folder(config, arrays), tmp_path)


def test_a_layer_without_an_order_among_ordered_ones_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    folder = compressed()
    groups = settings_of(folder)["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_1"]["weights"]["actorder"] = None
    assert values(folder, tmp_path)
    del folder.arrays[f"{LAYER}.weight_g_idx"]
    said = (
        r"weight_g_idx' is missing.*perhaps for other layers.* for all layers or none"
    )
    with pytest.raises(ValueError, match=said):
        values(folder, tmp_path)


def test_scales_of_a_quantized_cache_are_no_weights(tmp_path: Path) -> None:
    folder = compressed()
    original = values(folder, tmp_path)
    settings_of(folder)["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    for name in ("k_scale", "v_scale"):
        folder.arrays[f"model.layers.0.self_attn.{name}"] = np.ones(1, np.float16)
    assert outcome(folder, tmp_path, original) == "same"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_quantized_layers_without_settings_are_refused(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = checkpoint()
    folder.config = {}
    with pytest.raises(ValueError, match=rf"tensor '{LAYER}\..* of a quantized layer"):
        values(folder, tmp_path)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda each: each.__name__)
def test_a_number_in_quotes_is_refused_with_the_remedy(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = checkpoint()
    settings = settings_of(folder)
    if "config_groups" in settings:
        settings = settings["config_groups"]["group_0"]["weights"]
    (key, *_) = [key for key in ("num_bits", "bits", "group_size") if key in settings]
    settings[key] = str(settings[key])
    said = rf"config\.json: quantization.*{key}='\d+' is a text, .*remove the quotes"
    with pytest.raises(ValueError, match=said):
        list(read_checkpoint(folder.write(tmp_path)))


@pytest.mark.parametrize("k", [80, 160])
def test_a_shorter_last_group_is_refused_with_the_remedy(
    tmp_path: Path, k: int
) -> None:
    weight = foreign.drawn_weight(np.random.default_rng(0), 32, k, 16, 4)
    arrays = foreign.gptq_arrays(LAYER, weight, 2)
    for part in ("qzeros", "scales"):
        arrays[f"{LAYER}.{part}"] = arrays[f"{LAYER}.{part}"][: -(-k // 64)]
    folder = foreign.Folder(foreign.gptq_config(4, 2), arrays)
    said = rf"k={k} is no multiple of group_size=64.*last group of a row has {k % 64} c"
    with pytest.raises(ValueError, match=said):
        list(read_checkpoint(folder.write(tmp_path)))


@pytest.mark.parametrize(
    ("name", "size", "is_valid"),
    [
        ("bits", 1, True),
        ("bits", 0, False),
        ("bits", -1, False),
        ("bits", 4.0, False),
        ("bits", True, False),
        ("group_size", -1, True),  # the whole row
        ("group_size", -2, False),
        ("group_size", "64", False),
    ],
)
def test_sizes_of_a_scheme_are_integers_from_1(
    name: str, size: Any, is_valid: bool
) -> None:
    with nullcontext() if is_valid else pytest.raises(ValueError, match=f"{name}="):
        Scheme(**{name: size})


@pytest.mark.parametrize(("shape", "dtype"), [((8, 64), mx.int32), ((64,), mx.float32)])
def test_only_matrices_of_numbers_are_quantized(
    shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    with pytest.raises(ValueError, match="expected a matrix of one of"):
        Quantization(bits=4).apply(mx.ones(shape, dtype))


@pytest.mark.parametrize("name", ["tool.jinja", "additional_chat_templates/tool.jinja"])
def test_templates_of_chats_are_regular_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(ValueError, match=r"tool\.jinja.* regular file"):
        check_files(tmp_path)
