"""A model that llama.cpp's conversion wrote is mlx-lm's model again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin import load
from mlx_marlin.checkpoints.gguf import Container, config_of, read
from mlx_marlin.checkpoints.gguf.architectures import ARCHITECTURES
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.weights.bit_streams import codes_of_words
from support import gguf_cases, oracles
from support.gguf_blocks import draw_blocks, set_halves
from support.gguf_cases import CASES, HEADS, HIDDEN, KV_HEADS, Case, arguments
from support.gguf_files import Written, random_tensor, write_gguf
from support.gguf_models import (
    build,
    permuted,
    random_model,
    with_fused_gates,
    write_twice,
    written_model,
)
from support.gguf_vocabularies import byte_pairs, character_pairs
from support.profiles import sampled

TOKENS = mx.array([[1, 5, 39, 0, 7, 3, 3, 2]])
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def metadata_of(case: Case) -> dict[str, Any]:
    return case.metadata | byte_pairs("qwen2")


def written(name: str) -> tuple[Case, nn.Module, list[Written]]:
    """Returns a case, its model and the model's tensors."""
    model = random_model(CASES[name])
    return CASES[name], model, written_model(CASES[name], model)


def assert_same(found: nn.Module, model: nn.Module) -> None:
    np.testing.assert_allclose(
        np.array(found(TOKENS)), np.array(model(TOKENS)), rtol=1e-4, atol=1e-4
    )


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemmas_are_scaled_by_the_hidden_size(
    name: str, layers: int, path: Path
) -> None:
    case = replace(CASES[name], layers=layers)
    write_gguf(path, case.metadata, written_model(case, random_model(case)))

    assert config_of(Container(path))["query_pre_attn_scalar"] == HIDDEN / HEADS


@sampled(4)
@cases
def test_the_model_computes_the_same(name: str, path: Path) -> None:
    """And writes the same: more tokens than a window of the models that have one."""
    case, model, tensors = written(name)
    write_gguf(path, metadata_of(case), tensors)
    [*convert(open_source(path), path.parent / "folder")]

    config = config_of(Container(path))
    loaded, _ = load(path)
    converted, _ = load(path.parent / "folder")

    expected = arguments(case)
    epsilon = pytest.approx(expected.pop("rms_norm_eps"))  # a float32 in the file
    assert config["rms_norm_eps"] == epsilon
    assert {key: config.get(key) for key in expected} == expected
    for tensor in read(path):
        array = tensor.read()
        assert (array.shape, array.nbytes) == (tensor.shape, tensor.nbytes)
        assert tensor.format == "F32"
    parameters = dict(tree_flatten(converted.parameters()))
    for (left, array), (right, other) in zip(
        tree_flatten(model.parameters()), tree_flatten(loaded.parameters()), strict=True
    ):
        assert left == right
        # 1 + weight, as float32, is what Gemma's files hold.
        tolerance = 1e-7 if name in ("gemma2", "gemma3") else 0
        if left.endswith("A_log"):
            tolerance = 2e-7  # -exp(A_log), as float32
        np.testing.assert_allclose(array, other, rtol=0, atol=tolerance)
        assert mx.array_equal(parameters.pop(right), other)
    assert not parameters
    assert_same(loaded, model)
    assert_same(converted, model)
    assert greedy(loaded) == greedy(model)


def greedy(model: nn.Module) -> list[int]:
    cache, tokens = make_prompt_cache(model), [1, 5, 39]
    given = tokens
    for _ in range(20):
        tokens.append(int(model(mx.array([given]), cache=cache)[0, -1].argmax().item()))
        given = tokens[-1:]
    return tokens


def test_keys_that_layers_of_gemma4_do_not_use_are_left_out(path: Path) -> None:
    """Checkpoints hold them for layers that take keys and values of another one."""
    case, model, tensors = written("gemma4")
    unused = [
        each._replace(name=each.name.replace("blk.0", "blk.4"))
        for each in tensors
        if each.name.startswith(("blk.0.attn_k", "blk.0.attn_v"))
    ]
    assert len(unused) == 3
    write_gguf(path, case.metadata | character_pairs(), [*tensors, *unused])

    loaded, _ = load(path)

    assert greedy(loaded) == greedy(model)


def test_qwen3_next_is_the_model_that_mlx_lm_has_for_it(path: Path) -> None:
    case = CASES["qwen3next"]
    config = arguments(case) | {
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    }
    model = build(config)
    random = np.random.default_rng(0)
    drawn = {
        name: mx.array(random.normal(0, 0.2, array.shape).astype(np.float32))
        for name, array in tree_flatten(model.parameters())
    }
    model.load_weights([*drawn.items()])
    apart: dict[str, mx.array] = {}
    for name, array in drawn.items():
        if name.endswith("in_proj_qkvz.weight"):
            # Each head of keys has its queries, keys, values and gates.
            heads = [mx.split(each, [16, 32, 64]) for each in mx.split(array, KV_HEADS)]
            q, k, v, z = (mx.concatenate([*each]) for each in zip(*heads, strict=True))
            apart[name.replace("qkvz", "qkv")] = mx.concatenate([q, k, v])
            apart[name.replace("qkvz", "z")] = z
        else:
            apart[name] = array
    joined = SimpleNamespace(parameters=lambda: apart)
    tensors = written_model(case, joined)
    write_gguf(path, metadata_of(case), tensors)

    assert_same(load(path)[0], model)


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "glm4moe"])
def test_fused_gates_of_experts_are_divided(name: str, path: Path) -> None:
    case, model, tensors = written(name)
    write_gguf(path, metadata_of(case), with_fused_gates(tensors))

    assert_same(load(path)[0], model)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35moe", "qwen35"])
def test_layers_that_predict_further_tokens_are_left_out(name: str, path: Path) -> None:
    case, model, tensors = written(name)
    write_gguf(path, metadata_of(case) | further(case), [*tensors, *layer_behind(case)])

    assert_same(load(path)[0], model)


def further(case: Case) -> dict[str, int]:
    """Returns the metadata of one more layer, which predicts further tokens."""
    counts = {"block_count": case.layers + 1, "nextn_predict_layers": 1}
    return {f"{case.architecture}.{key}": value for key, value in counts.items()}


def layer_behind(case: Case) -> list[Written]:
    """Returns such a layer: a decoder layer, and what joins it to the model."""
    stems = set(ARCHITECTURES[case.architecture].block) - {"ssm_a"}
    names = [*stems, "nextn.eh_proj", "nextn.enorm", "nextn.shared_head_norm"]
    return [
        Written(f"blk.{case.layers}.{stem}.weight", "F32", (4,), bytes(16))
        for stem in names
    ]


def again(name: str, source: str) -> Callable[[Case, list[Written]], list[Written]]:
    """Returns what adds a tensor with the contents of another one."""

    def change(case: Case, tensors: list[Written]) -> list[Written]:
        (found,) = (each for each in tensors if each.name == source)
        return [*tensors, found._replace(name=name)]

    return change


Change = Callable[[Case, list[Written]], list[Written]]
LEFT_OVER: list[tuple[str, Change, dict[str, int], str]] = [
    # Layers that nobody announces, or of which no layer has such a tensor.
    ("qwen3", again("blk.2.attn_norm.weight", "output_norm.weight"), {}, "blk.2"),
    ("qwen3", again("blk.99.attn_q.weight", "blk.0.attn_q.weight"), {}, "blk.99"),
    ("qwen3", lambda _, tensors: tensors, {"block_count": 1}, "blk.1"),
    ("gemma4", again("blk.6.attn_k.weight", "blk.0.attn_k.weight"), {}, "blk.6"),
    ("glm4moe", lambda case, ours: ours + layer_behind(case), {}, "blk.3"),
    ("glm4moe", again("blk.0.nextn.enorm.weight", "output_norm.weight"), {}, "blk.0"),
    (
        "glm4",
        again("blk.2.nextn.unknown.weight", "output_norm.weight"),
        {"block_count": 3, "nextn_predict_layers": 1},
        "blk.2",
    ),
    (
        "glm4",
        again("blk.3.nextn.enorm.weight", "output_norm.weight"),
        {"block_count": 3, "nextn_predict_layers": 1},
        "blk.3",
    ),
    # Keys that a layer takes from another one have no bias.
    ("gemma4", again("blk.4.attn_k.bias", "output_norm.weight"), {}, "4.*bias"),
    # One parameter twice, and factors of frequencies of two kinds.
    (
        "qwen3moe",
        again("blk.1.ffn_gate_up_exps.weight", "blk.1.ffn_down_exps.weight"),
        {},
        r"blk\.1\.ffn_gate_up_exps.* holds .*gate_proj",
    ),
    (
        "gemma4",
        again("rope_factors_long.weight", "rope_freqs.weight"),
        {},
        "rope_factors_long.*rope_freqs",
    ),
]


@pytest.mark.parametrize(("name", "change", "keys", "message"), LEFT_OVER)
def test_no_tensor_is_left_out_in_silence(
    name: str, change: Change, keys: dict[str, int], message: str, path: Path
) -> None:
    case, _, tensors = written(name)
    said = {f"{case.architecture}.{key}": value for key, value in keys.items()}
    write_gguf(path, metadata_of(case) | said, change(case, tensors))

    with pytest.raises(ValueError, match=rf"model\.gguf: tensor .*{message}"):
        load(path)


@sampled(4)
@cases
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_rows_and_columns_are_in_the_order_of_the_model(
    name: str, kind: str, tmp_path: Path
) -> None:
    case, _, tensors = written(name)

    def blocks(values: np.ndarray) -> np.ndarray:
        return quants.quantize(values, GGMLQuantizationType[kind])

    *paths, _ = write_twice(tmp_path, metadata_of(case), tensors, kind, blocks)

    found, expected = (load(path)[0](TOKENS) for path in paths)
    assert oracles.error(found, np.array(expected, np.float64)) < 1e-2


@pytest.mark.parametrize("optimized", [False, True])
def test_a_model_of_one_bit_computes_with_its_signs(
    optimized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cases, "HIDDEN", 128)
    case, _, tensors = written("qwen3")
    random = np.random.default_rng(5)

    def blocks(values: np.ndarray) -> np.ndarray:
        octets = draw_blocks("Q1_0", values.shape, random)
        whole = octets.reshape(*values.shape[:-1], -1, 18)
        halves = random.uniform(0.05, 0.1, (*whole.shape[:-1], 1)).astype("<f2")
        set_halves("Q1_0", whole, halves)
        return whole.reshape(octets.shape)

    *paths, _ = write_twice(tmp_path, metadata_of(case), tensors, "Q1_0", blocks)
    found, expected = (load(path)[0] for path in paths)
    if optimized:
        mlx_marlin.optimize(found)

    wide = np.array(expected(TOKENS).astype(mx.float32), np.float64)
    assert oracles.error(found(TOKENS), wide) < 1e-2


@pytest.mark.parametrize(
    ("given", "projector"),
    [
        ("folder", "mmproj-model-f16.gguf"),
        ("first", "gemma-4-E2B-it-mmproj.gguf"),
        ("one", "mmproj.gguf"),
        ("one", "model.mmproj-Q8_0.gguf"),
    ],
)
def test_a_folder_or_the_first_part_stands_for_the_model(
    given: str, projector: str, tmp_path: Path
) -> None:
    case, model, tensors = written("qwen3")
    folder = tmp_path / "model"
    folder.mkdir()
    names = ["model.gguf"]
    if given != "one":
        names = [f"model-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for part, name in enumerate(names):
        split = {"split.no": ("u16", part), "split.count": ("u16", len(names))}
        split |= {"split.tensors.count": ("i32", len(tensors))}
        own = {} if part else metadata_of(case)
        write_gguf(folder / name, own | split, tensors[part :: len(names)])
    beside = folder / projector
    beside.write_bytes(b"GGUF")

    path = folder / names[0] if given == "first" else folder
    with pytest.warns(RuntimeWarning, match=f"{beside} is ignored"):
        loaded, _ = load(path)

    assert_same(loaded, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"split.no": ("u16", 2)},
            r"model-00002-of-00002\.gguf.*'split.no'.*must be 1",
        ),
        (None, r"model-00002-of-00002\.gguf"),
        ({"tensor": True}, r"tensor 'token_embd\.weight' is in two parts"),
        # Of another model, of other parts, or with what the first part has not said.
        (
            {"general.architecture": "qwen2"},
            r"00002\.gguf.*'general.architecture' \('qwen2'\) must be that of.*00001",
        ),
        ({"split.count": ("u16", 3)}, r"00002\.gguf.*'split.count' \(3\) must be"),
        ({"qwen3.block_count": 3}, r"00002\.gguf.*'qwen3.block_count' \(3\) must be"),
        ({"qwen3.rope.freq_base": 5e5}, r"00002\.gguf.*'qwen3.rope.freq_base'"),
        ({"qwen3.rope.scaling.type": "yarn"}, r"00002\.gguf.*has none"),
        ({"split.tensors.count": ("i32", 7)}, r"00002\.gguf.*'split.tensors.count'"),
        (
            {"total": 7},
            r"00001-of-00002\.gguf.*'split.tensors.count' \(7\) must be 2\d",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: dict | None, message: str, tmp_path: Path
) -> None:
    case, _, tensors = written("qwen3")
    split = {"split.no": ("u16", 0), "split.count": ("u16", 2)}
    names = [tmp_path / f"model-0000{part}-of-00002.gguf" for part in (1, 2)]
    total = {} if change is None else {"split.tensors.count": change.pop("total", None)}
    total = {key: ("i32", count) for key, count in total.items() if count}
    write_gguf(names[0], case.metadata | split | total, tensors)
    if change is not None:
        twice = [t for t in tensors if t.name == "token_embd.weight"]
        own = twice if change.pop("tensor", False) else []
        write_gguf(names[1], split | {"split.no": ("u16", 1)} | change, own)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Container(names[0])


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    split = {"split.no": ("u16", 1), "split.count": ("u16", 2)}
    path = write_gguf(tmp_path / "model-00002-of-00002.gguf", split)
    with pytest.raises(ValueError, match="expected the first part, model-00001-of-000"):
        Container(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K", "Q5_K", "F16"])
@pytest.mark.parametrize(
    ("stem", "heads", "said"),
    [("q", HEADS, True), ("k", KV_HEADS, True), ("k", HEADS, False)],
)
def test_rows_of_queries_and_keys_are_in_the_order_of_the_model(
    kind: str, stem: str, heads: int, said: bool, path: Path
) -> None:
    """Keys have as many heads as queries if the file does not say their number."""
    random = np.random.default_rng(1)
    shape = (heads * 16, 256)
    tensor = random_tensor("blk.0.attn_v.weight", kind, shape, random)
    stored = tensor._replace(name=f"blk.1.attn_{stem}.weight")
    metadata = CASES["llama"].metadata
    if not said:
        del metadata["llama.attention.head_count_kv"]
    write_gguf(path, metadata, [tensor, stored])

    in_order, restored = (tensor.read() for tensor in read(path))

    # `attn_v` is stored in order, so permuting what is restored gives its rows.
    if kind == "F16":
        np.testing.assert_array_equal(permuted(np.array(restored), heads), in_order)
        return
    assert isinstance(in_order, StoredWeight)
    assert isinstance(restored, StoredWeight)
    for part in ("codes", "scales", "biases"):
        wanted = getattr(in_order, part)
        if wanted is not None:
            given = np.array(getattr(restored, part))
            np.testing.assert_array_equal(permuted(given, heads), wanted)


def test_experts_stay_stacked(path: Path) -> None:
    random = np.random.default_rng(1)
    tensor = random_tensor("blk.0.ffn_gate_exps.weight", "Q4_K", (4, 32, 256), random)
    write_gguf(path, CASES["qwen3moe"].metadata, [tensor])

    (read_tensor,) = read(path)
    weight = read_tensor.read()

    assert read_tensor.name == "model.layers.0.mlp.switch_mlp.gate_proj.weight"
    assert isinstance(weight, StoredWeight)
    assert weight.shape == (4, 32, 256)
    assert codes_of_words(weight.codes, 4).shape == (4, 32, 256)
    assert weight.mode == "k_quant"
    assert weight.scales.shape == (4, 32, 10)
