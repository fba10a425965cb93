"""What mlx-lm's models do to plain weights never happens to codes.

The oracle is mlx-lm: its `sanitize` and its model, with the decoded weights in float32.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

import mlx_marlin
from mlx_marlin.checkpoints import folder
from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.checkpoints.writing import Shards
from mlx_marlin.lm.checkpoints import renaming
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.folder_source import FolderSource
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.checkpoints.moved_rows import Rows, gathered, moved
from mlx_marlin.lm.checkpoints.renaming import Source
from support import foreign_checkpoints as foreign
from support import foreign_models, oracles
from support.configurations import COMMON, new_model, settings_of
from support.containers import CONTAINERS, TOKENS, Weight, integers, write_model
from support.models import Tokenizer
from support.profiles import sampled

Stored = dict[str, np.ndarray]
MODELS = [
    *("DeepSeek-V3", "GLM-4.7-Flash", "GLM-5", "Mistral-Small-4", "LongCat-Flash"),
    *("Kimi-K2.5", "Ling-mini-2.0", "Granite-4.0-Micro", "Falcon-H1-1.5B"),
    "Llama-4-Scout",
]
"""Configurations whose weights mlx-lm renames, divides, turns or scales."""
PLAIN = re.compile(r"embed|norm|mlp\.gate\.|router|indexer|conv|classifier")


WIDE = {"kv_lora_rank": 128, "v_head_dim": 64, "qk_nope_head_dim": 64}
"""Sizes of latent attention that are whole groups."""


def config_of(name: str) -> dict[str, Any]:
    config = settings_of(name) | WIDE
    return config | {k: v | WIDE for k, v in config.items() if k == "text_config"}


def is_linear(name: str, array: np.ndarray) -> bool:
    return name.endswith(".weight") and array.ndim == 2 and not PLAIN.search(name)


def of_mlx(
    rng: np.random.Generator, layer: str, shape: tuple[int, int], **format: Any
) -> Weight:
    values = mx.array(rng.normal(size=shape) * 0.2).astype(mx.float16)
    codes, *others = mx.quantize(values, **format)
    wide = [p if p.dtype == mx.uint8 else p.astype(mx.float32) for p in others]
    exact = mx.dequantize(codes, *wide, **format, dtype=mx.float32)
    parts = zip(("weight", "scales", "biases"), (codes, *others), strict=False)
    return {f"{layer}.{part}": np.array(a) for part, a in parts}, np.array(exact)


def gptq(layer: str, weight: foreign.IntegerWeight) -> Stored:
    zeros = np.zeros(len(weight.codes), np.float16)  # as GPTQ's tools write them
    return foreign.gptq_arrays(layer, weight, 2) | {f"{layer}.bias": zeros}


EIGHT = {"group_size": 32, "bits": 8}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
FORMATS: dict[str, tuple[Callable[..., Weight], dict[str, Any]]] = {
    "gptq": (partial(integers, arrays=gptq), foreign.gptq_config(4, 2)),
    "act-order": (
        partial(integers, arrays=gptq, act_order=True),
        foreign.gptq_config(4, 2),
    ),
    "compressed": CONTAINERS["compressed-tensors"][::-1],
    "mlx": (partial(of_mlx, **EIGHT), {"quantization": EIGHT}),
    "mxfp4": (partial(of_mlx, **MXFP4), {"quantization": MXFP4}),
}
"""What stands for a matrix, and what the config says."""


def write(path: Path, name: str, format: str, dtype: type = np.float32) -> Any:
    """Writes a model; returns mlx-lm's model of the same numbers in float32."""
    weight, said = FORMATS[format]
    own = partial(weight, np.random.default_rng(0))
    options: dict[str, Any] = {"quantizes": is_linear, "dtype": dtype}
    return write_model(path, config_of(name), own, said, **options)


def write_plain(path: Path, name: str) -> Any:
    """Writes a model without quantized layers, as `write` does."""
    said = foreign.gptq_config(4, 2)
    return write_model(path, config_of(name), lambda *_: None, said, dtype=np.float16)


def assert_same(model: Any, exact: Any, most: float = 1e-3) -> None:
    expected = np.array(exact(TOKENS), np.float64)
    assert oracles.error(model(TOKENS).astype(mx.float32), expected) < most


@sampled(4, 10)
@pytest.mark.parametrize("format", ["act-order", "mlx", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_with_the_decoded_weights(
    tmp_path: Path, name: str, format: str
) -> None:
    exact = write(tmp_path / "source", name, format)
    assert_same(load_model(open_source(tmp_path / "source")), exact)
    [*convert(open_source(tmp_path / "source"), tmp_path / "result")]
    assert_same(load_model(open_source(tmp_path / "result")), exact)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize(
    ("format", "parts"),
    [("gptq", ["embed_q"]), ("act-order", ["embed_q", "unembed_out"])],
)
def test_what_is_computed_has_the_dtype_of_the_other_plain_weights(
    tmp_path: Path, format: str, parts: list[str], dtype: mx.Dtype
) -> None:
    """Scales have float16, which would round it."""
    own = np.float16 if dtype == mx.float16 else np.float32
    write(tmp_path, "DeepSeek-V3", format, own)
    source = open_source(tmp_path)
    model: Any = load_model(source)
    attention = model.model.layers[0].self_attn
    assert attention.embed_q.weight.dtype == model(TOKENS).dtype == dtype
    names = [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in range(2)
        for part in parts
    ]
    assert [*source.computed] == names
    rows = [*convert(open_source(tmp_path), tmp_path / "result", dry_run=True)]
    errors = {row.name: row.error for row in rows if row.source == "quantized, decoded"}
    assert errors == source.computed
    most = 0 if dtype == mx.float32 else 2**-11
    assert all(0 <= error <= most for error in errors.values())
    assert any(errors.values()) is (dtype == mx.float16)


@sampled(2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("format", ["gptq", "compressed", "mlx"])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "LongCat-Flash", "Kimi-K2.5"])
def test_models_with_layers_of_heads_are_saved_and_loaded(
    tmp_path: Path, name: str, format: str, layout: str
) -> None:
    exact = write(tmp_path / "source", name, format)
    [*convert(open_source(tmp_path / "source"), tmp_path / "mlx", layout="mlx")]
    model, _ = utils.load_model(tmp_path / "mlx")
    mlx_marlin.optimize(model, layout=layout, measure=False)
    mlx_marlin.save(tmp_path / "saved", model, Tokenizer())
    # MLX's layout rounds biases.
    assert_same(load_model(open_source(tmp_path / "saved")), exact, 1e-2)


@sampled(2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.7-Flash", "Mistral-Small-4"])
def test_layers_of_heads_are_quantized_on_the_way(
    tmp_path: Path, name: str, layout: str
) -> None:
    exact = write_plain(tmp_path / "source", name)
    how = Quantization(bits=8, group_size=64)
    options: dict[str, Any] = {"layout": layout, "quantization": how}
    rows = [*convert(open_source(tmp_path / "source"), tmp_path / "result", **options)]
    heads = [row for row in rows if "embed_q" in row.name or "unembed" in row.name]
    assert {row.target for row in heads} == {"affine 8-bit, group 64, mlx layout"}
    assert_same(load_model(open_source(tmp_path / "result")), exact, 0.1)


def test_a_layer_that_mlx_lm_would_read_wrongly_is_not_written(tmp_path: Path) -> None:
    write_plain(tmp_path / "source", "Ling-mini-2.0")
    options: dict[str, Any] = {"quantization": Quantization(), "layout": "mlx"}
    said = r"result: what was written cannot be loaded: tensors \['lm_head.weight'\]"
    with pytest.raises(ValueError, match=said):
        [*convert(open_source(tmp_path / "source"), tmp_path / "result", **options)]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("written_by", ["convert", "save"])
@pytest.mark.parametrize("damage", ["name", "shape"])
def test_a_folder_that_cannot_be_loaded_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, written_by: str
) -> None:
    write(tmp_path / "source", "Granite-4.0-Micro", "gptq")
    source = open_source(tmp_path / "source")
    model = load_model(open_source(tmp_path / "source"))
    add = Shards.add

    def damaged(shards: Shards, name: str, array: mx.array) -> None:
        is_wanted = name.endswith("1.mlp.up_proj.words")
        if is_wanted and damage == "shape":
            array = array[:-1]
        add(shards, f"{name}x" if is_wanted and damage == "name" else name, array)

    monkeypatch.setattr(Shards, "add", damaged)
    result = tmp_path / "result"
    write_again: dict[str, Callable[[], object]] = {
        "convert": lambda: [*convert(source, result)],
        "save": lambda: mlx_marlin.save(result, model, Tokenizer()),
    }
    said = r"result: what was written cannot be loaded: .*1\.mlp\.up_proj"
    with pytest.raises(ValueError, match=said):
        write_again[written_by]()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


DRAFTS = {
    "eh_proj": {},
    "self_attn.o_proj": {"num_nextn_predict_layers": 1},
}


@pytest.mark.parametrize("part", DRAFTS)
@pytest.mark.parametrize("name", ["DeepSeek-V3", "Granite-4.0-Micro"])
def test_layers_that_draft_tokens_are_left_out_at_any_depth(
    tmp_path: Path, name: str, part: str
) -> None:
    write(tmp_path, name, "gptq")
    folder = Folder(tmp_path)
    arrays = {key: np.array(folder.read(key)) for key in folder.arrays}
    before = [each for each, _ in open_source(tmp_path).parameters()]
    weight = foreign.drawn_weight(np.random.default_rng(0), 128, 128, 64, 4)
    arrays |= foreign.gptq_arrays(f"model.layers.2.{part}", weight, 2)
    arrays |= foreign.gptq_arrays("model.layers.2.self_attn.kv_b_proj", weight, 2)
    arrays["model.layers.2.enorm.weight"] = np.ones(128, np.float16)
    arrays["mtp.norm.weight"] = np.ones(128, np.float16)
    config = folder.config | DRAFTS[part]
    foreign.Folder(config, arrays).write(tmp_path)
    assert [each for each, _ in open_source(tmp_path).parameters()] == before
    if name == "Granite-4.0-Micro":  # mlx-lm's DeepSeek takes layer 20 for layer 2
        arrays["model.layers.20.enorm.weight"] = np.ones(128, np.float16)
        foreign.Folder(config, arrays).write(tmp_path)
        with pytest.raises(ValueError, match=r"layers\.20\.enorm.*no such tensor"):
            [*open_source(tmp_path).parameters()]


def tags(rows: int, number: int = 0) -> mx.array:
    return renaming._table(rows) + renaming._number(number)


MOVES: dict[str, Callable[[mx.array], mx.array]] = {
    "split": lambda t: t[3:9],
    "turned twice": lambda t: mx.contiguous(t.T).T,
    "interleaved": lambda t: t.reshape(4, 3, -1).swapaxes(0, 1).reshape(12, -1),
    "joined": lambda t: mx.concatenate([t[6:], tags(5, 9), t[:1]]),
    "heads": lambda t: mx.stack([t[:4], t[4:8]]),
}
CHANGES: dict[str, Callable[[mx.array], mx.array]] = {
    "turned heads": lambda t: t.reshape(3, 4, 4).swapaxes(1, 2),
    "columns": lambda t: t[:, mx.array([1, 0, 2, 3])],
    "constants": lambda t: t[:, mx.array([0, 1, 3, 2])],
    "halves": lambda t: t[:, :2],
    "one row scaled": lambda t: t[:1] * 2.0,
    "scaled": lambda t: t * 2.0,
    "scaled rows": lambda t: t * mx.arange(12)[:, None],
    "shifted": lambda t: t + 1.0,
    "scaled and shifted": lambda t: t * 3.0 + 1.0,
    "mean of rows": lambda t: (t[0::2] + t[2::2][:1]) / 2,
    "sum of rows": lambda t: t[1:3] + t[2:4] - t[3:5],
    "normed": lambda t: t / mx.linalg.norm(mx.real(t), axis=0, keepdims=True),
    "rounded": lambda t: t.astype(mx.float16).astype(mx.complex64),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_of_rows_are_found(move: str) -> None:
    array = MOVES[move](tags(12))
    found = renaming._rows_of(array)
    assert found is not None
    assert found.shape == array.shape[:-1]
    runs = zip(found.numbers, found.first, found.lengths, strict=True)
    rows = [complex(r + i, number) for number, r, count in runs for i in range(count)]
    np.testing.assert_array_equal(rows, np.array(array[..., 0]).ravel())


def test_a_matrix_that_was_turned_is_as_it_was() -> None:
    found = renaming._rows_of(tags(12).T)
    assert found is not None
    assert [*map(list, found)] == [[12], [0], [0], [12]]


GPT2 = {
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 64,
}


@sampled(2, 4)
@pytest.mark.parametrize("form", ["gptq", "plain"])
@pytest.mark.parametrize("start", ["", "model."])
def test_layers_of_gpt2_are_turned_unless_they_are_quantized(
    tmp_path: Path, start: str, form: str
) -> None:
    rng = np.random.default_rng(0)
    exact, arrays = folder.new_model(GPT2), {}
    values: dict[str, mx.array] = {}
    for name, array in tree_flatten(exact.parameters()):
        own = start + name.removeprefix("model.")
        if ".c_" in name and name.endswith(".weight"):
            weight = foreign.drawn_weight(rng, *array.shape, 64, 4)
            weight.scales = (weight.scales / 16).astype(np.float16)
            turned = weight.values if start else weight.values.T
            quantized = foreign.gptq_arrays(own.removesuffix(".weight"), weight, 2)
            plain = {own: turned.astype(np.float16)}
            arrays |= plain if form == "plain" else quantized
            values[name] = mx.array(weight.values.astype(np.float32))
        else:
            drawn = (rng.normal(size=array.shape) * 0.3).astype(np.float16)
            arrays[own] = drawn
            values[name] = mx.array(drawn.astype(np.float32))
    exact.load_weights([*values.items()])
    settings = {} if form == "plain" else foreign.gptq_config(4, 2)
    foreign.Folder(settings | GPT2, arrays).write(tmp_path / "source")
    [*convert(open_source(tmp_path / "source"), tmp_path / "result")]
    for path in ("source", "result"):
        assert_same(load_model(open_source(tmp_path / path)), exact)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_rows_are_found(change: str) -> None:
    assert renaming._rows_of(CHANGES[change](tags(12))) is None


def stored(weight: foreign.IntegerWeight, mode: str) -> StoredWeight:
    biases = {
        "symmetric": None,
        "zero_point": mx.array(weight.zeros.astype(np.float16)),
        "affine": mx.array((-weight.scales * weight.zeros).astype(np.float16)),
    }[mode]
    return StoredWeight(
        codes=mx.array(foreign.bit_stream(weight.codes, weight.bits).view(np.uint32)),
        scales=mx.array(weight.scales),
        biases=biases,
        group_size=weight.codes.shape[1] // weight.scales.shape[1],
        bits=weight.bits,
        mode=mode,
    )


@pytest.mark.parametrize(
    ("first", "second", "united"),
    [
        (("symmetric", 4, 64), ("symmetric", 4, 64), ("symmetric", 4, 64)),
        (("symmetric", 4, 64), ("symmetric", 4, 32), ("symmetric", 4, 32)),
        (("symmetric", 4, 64), ("symmetric", 8, 64), ("zero_point", 8, 64)),
        (("symmetric", 3, 64), ("zero_point", 3, 128), ("zero_point", 3, 64)),
        (("zero_point", 5, 32), ("zero_point", 2, 128), ("zero_point", 5, 32)),
        (("affine", 4, 64), ("affine", 6, 32), ("affine", 6, 32)),
        (("affine", 4, 64), ("symmetric", 4, 64), None),
    ],
)
def test_rows_of_two_formats_get_the_finest_exactly(
    first: tuple, second: tuple, united: tuple | None
) -> None:
    rng = np.random.default_rng(0)
    weights = [
        stored(
            foreign.drawn_weight(
                rng, 8, 256, size, bits, symmetric=mode == "symmetric"
            ),
            mode,
        )
        for mode, bits, size in (first, second)
    ]
    pick = rng.permutation(16)
    rows = Rows.of((2, 8), pick // 8, pick % 8)
    found = moved(rows, dict(enumerate(weights)))
    if united is None:
        assert found is None
        return
    assert found is not None
    assert (found.mode, found.bits, found.group_size) == united
    both = np.concatenate([np.array(weight.decoded()) for weight in weights])
    np.testing.assert_array_equal(found.decoded(), both[pick].reshape(2, 8, 256))


@pytest.mark.parametrize("step", [1, 5])
def test_rows_are_gathered_in_slices_or_one_by_one(step: int) -> None:
    arrays = {n: mx.arange(700).reshape(7, 50, 2) + 700 * n for n in (4, 2)}
    flat = np.arange(700) * step % 700
    numbers = np.where(flat < 350, 4, 2)
    found = gathered(Rows.of((7, 100), numbers, flat % 350), arrays)
    both = np.concatenate([np.array(array).reshape(-1, 2) for array in arrays.values()])
    np.testing.assert_array_equal(found, both[flat].reshape(7, 100, 2))


def test_matrices_keep_their_factors_and_rows_of_one_share_it() -> None:
    def weight(*factors: float) -> StoredWeight:
        shape = (len(factors), 4) if len(factors) > 1 else (4,)
        return StoredWeight(
            codes=mx.full((*shape, 2), 0x24531672, mx.uint32),
            scales=mx.full((*shape, 1), 0x38, mx.uint8),
            group_size=16,
            bits=4,
            mode="nvfp4",
            global_scale=mx.array(factors),
        )

    weights = {0: weight(1.0, 2.0), 1: weight(3.0)}
    numbers = np.repeat([1, 0], 4)
    halves = moved(Rows.of((2, 4), numbers, np.r_[0:4, 4:8]), weights)
    assert halves is not None
    assert halves.global_scale is not None
    assert halves.global_scale.tolist() == [3.0, 2.0]
    assert moved(Rows.of((2, 4), numbers, np.r_[0:4, 2:6]), weights) is None

    one, two = weight(1.0), weight(2.0)
    sources = {"0": Source((4,), lambda _: one), "1": Source((4,), lambda _: two)}

    def join(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        return {"both.weight": mx.concatenate([arrays["1.weight"], arrays["0.weight"]])}

    found = renaming.renamed(Path(), sources, {}, join, join)
    assert found.computed == {"both.weight"}
    assert not found.weights
    expected = [two.decoded(), one.decoded()]
    assert mx.array_equal(found.arrays["both.weight"], mx.concatenate(expected))


def test_more_bits_do_not_hide_a_zero_point_that_is_no_code() -> None:
    rng = np.random.default_rng(0)
    narrow, wide = (foreign.drawn_weight(rng, 4, 64, 64, bits) for bits in (4, 8))
    narrow.zeros[2, 0] = 16
    weights = {0: stored(narrow, "zero_point"), 1: stored(wide, "zero_point")}
    rows = Rows.of((2, 4), np.repeat([0, 1], 4), np.r_[0:4, 0:4])
    with pytest.raises(ValueError, match="a zero point is 16, expected at most 15"):
        moved(rows, weights)


@pytest.mark.parametrize("module", renaming.STACKED)
def test_experts_are_stacked_in_the_order_of_their_numbers(module: str) -> None:
    values = np.arange(2 * 13 * 6, dtype=np.float32).reshape(2, 13, 2, 3)
    arrays = {
        f"m.{layer}.experts.{expert}.up.weight": mx.array(values[layer, expert])
        for layer in (0, 1)
        for expert in sorted(range(13), key=str, reverse=True)
    }
    arrays |= {name: mx.zeros(1) for name in ("m.0.up.weight", "n.experts.0.up.bias")}
    places = {f"m.{layer}.{module}.up" for layer in (0, 1)}
    found = renaming.stack(arrays, lambda name: object() if name in places else None)
    assert {*found} == {
        *(f"{place}.weight" for place in places),
        *("m.0.up.weight", "n.experts.0.up.bias"),
    }
    for layer in (0, 1):
        stacked = found[f"m.{layer}.{module}.up.weight"]
        np.testing.assert_array_equal(stacked, values[layer])


def test_a_bias_of_rows_that_are_turned_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "DeepSeek-V3", "gptq")
    folder = Folder(tmp_path)
    arrays = {key: np.array(folder.read(key)) for key in folder.arrays}
    name = "model.layers.1.self_attn.kv_b_proj.bias"
    arrays[name][0] = 1  # of embed_q
    foreign.Folder(folder.config, arrays).write(tmp_path)
    with pytest.raises(ValueError, match=rf"tensor '{name}' .*no such tensor"):
        [*open_source(tmp_path).parameters()]


def test_biases_follow_weights_that_are_joined_and_divided() -> None:
    weights = [one_weight(), one_weight()]

    def sanitize(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        first, second = (arrays.pop(f"old.{n}.weight") for n in "ab")
        arrays["new.weight"] = mx.concatenate([second, first[2:]])
        arrays["rest.weight"] = first[:2]
        return arrays

    sources = {
        f"old.{name}": Source((4,), lambda _, own=weight: own)
        for name, weight in zip("ab", weights, strict=True)
    }
    biases = {"old.a.bias": mx.arange(4), "old.b.bias": mx.arange(4) + 10}
    found = renaming.renamed(Path(), sources, biases, sanitize, sanitize)
    assert {*found.weights} == {"new", "rest"}
    named = {name: array.tolist() for name, array in found.arrays.items()}
    assert named == {"new.bias": [10, 11, 12, 13, 2, 3], "rest.bias": [0, 1]}


def one_weight() -> StoredWeight:
    rng = np.random.default_rng(0)
    return stored(foreign.drawn_weight(rng, 4, 64, 64, 4), "zero_point")


def test_values_that_a_model_casts_are_decoded_ones() -> None:
    weight = one_weight()

    def sanitize(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        return {
            "a.norms": mx.linalg.norm(arrays["a.weight"].astype(mx.float32), axis=1)
        }

    sources = {"a": Source((4,), lambda _: weight)}
    found = renaming.renamed(Path(), sources, {}, sanitize, sanitize)
    expected = np.linalg.norm(np.array(weight.decoded()), axis=1)
    np.testing.assert_allclose(found.arrays["a.norms"], expected, rtol=1e-6)


def test_a_head_that_was_normed_before_it_was_quantized_keeps_its_codes(
    tmp_path: Path,
) -> None:
    config = {**COMMON, "model_type": "baichuan_m1", "conv_window": 2}
    config |= {"sliding_window_layers": [], "quantization": EIGHT}
    model = new_model(config)
    nn.quantize(model, **EIGHT, class_predicate=lambda name, _: name == "lm_head")
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    source = open_source(tmp_path)
    head = dict(source.parameters())["lm_head.weight"]
    assert isinstance(head, StoredWeight)
    assert not source.computed


def test_parameters_come_in_the_order_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_models, "LAYERS", 12)
    foreign_models.write(tmp_path, "plain", num_hidden_layers=12)

    names = [name for name, _ in FolderSource(tmp_path).stored_parameters()]

    numbers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert numbers == sorted(numbers)
    assert {*numbers} == {*range(12)}
