"""Converted checkpoints hold the same weights, or none is left."""

import json
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import llama

from mlx_marlin.checkpoints import quantization
from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.formats import marlin_folder, mlx_folder
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.writing import Shards
from mlx_marlin.lm.checkpoints.conversion import Row, convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from mlx_marlin.lm.checkpoints.saving import save
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.packed_weight import PackedWeight
from support import oracles
from support.foreign_models import CONFIG, FORMATS, LINEAR, write
from support.models import Tokenizer
from support.profiles import sampled


def converted(folder: Path, **options: Any) -> list[Row]:
    """Converts a source to a result in the same folder; returns the table's rows."""
    return [*convert(open_source(folder / "source"), folder / "result", **options)]


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def read_back(path: Path) -> dict[str, np.ndarray]:
    """The weights of a converted folder, by what its config says."""
    folder = Folder(path)
    values = {}
    layers = folder.config["mlx_marlin"]["layers"]
    for layer, record in layers.items():
        packed = PackedWeight(
            words=folder.read(f"{layer}.words"),
            scales=folder.read(f"{layer}.packed_scales"),
            **{name: record[name] for name in ("n", "k", "group_size", "bits", "mode")},
        )
        value = np.array(dequantize(packed, mx.float32))
        if f"{layer}.input_order" in folder.arrays:
            value = value[:, np.argsort(folder.read(f"{layer}.input_order"))]
        values[f"{layer}.weight"] = value
    quantized = [*layers]
    if (format := folder.config.get("quantization")) is not None:
        layer = "model.embed_tokens"
        parts = [
            name for name in mlx_folder.PARTS if f"{layer}.{name}" in folder.arrays
        ]
        codes, scales, *biases = (folder.read(f"{layer}.{part}") for part in parts)
        decoded = mx.dequantize(codes, scales, *biases, **format, dtype=mx.float32)
        values[f"{layer}.weight"] = np.array(decoded)
        quantized.append(layer)
    for name in folder.arrays:
        if name.rpartition(".")[0] not in quantized:
            values[name] = np.array(folder.read(name))
    return values


def folded(exact: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Weights with the features between gate, up and down in the order of `g_idx`."""
    stored = mx.load(str(path / "model.safetensors"))
    assert isinstance(stored, dict)
    moved = dict(exact)
    for name in stored:
        if name.endswith(".mlp.down_proj.g_idx"):
            order = np.argsort(np.array(stored[name]), kind="stable")
            mlp = name.removesuffix(".down_proj.g_idx")
            for layer in ("gate_proj", "up_proj"):
                moved[f"{mlp}.{layer}.weight"] = exact[f"{mlp}.{layer}.weight"][order]
            down = f"{mlp}.down_proj.weight"
            moved[down] = exact[down][:, order]
    return moved


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_the_same(tmp_path: Path, name: str) -> None:
    exact = folded(write(tmp_path / "source", name), tmp_path / "source")

    rows = converted(tmp_path)

    values = read_back(tmp_path / "result")
    assert {*values} == {*exact} == {row.name for row in rows}
    for parameter, value in values.items():
        # Scale times whole number: exact in float32.
        np.testing.assert_array_equal(value, exact[parameter].astype(np.float32))
    assert all(row.error == 0 for row in rows)
    result = Folder(tmp_path / "result")
    stored = sum(array.nbytes for array in result.arrays.values())
    assert stored == sum(row.nbytes for row in rows)
    assert {*result.config} == {*CONFIG, "mlx_marlin"}
    assert (tmp_path / "result" / "tokenizer_config.json").read_text() == "{}"


def test_mlx_lm_reads_what_is_written_in_its_layout(tmp_path: Path) -> None:
    exact = write(tmp_path / "source", "symmetric")

    rows = converted(tmp_path, layout="mlx")

    assert all(row.error == 0 for row in rows)
    model, config = utils.load_model(tmp_path / "result")
    assert config["quantization"] == {"bits": 5, "group_size": 64, "mode": "affine"}
    layer = model.model.layers[1].mlp.down_proj
    halves = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
    value = mx.dequantize(layer.weight, *halves, 64, 5)
    expected = exact["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(np.array(value), expected.astype(np.float32))


def test_layers_of_mlx_that_do_not_match_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "source", "symmetric")
    converted(tmp_path, layout="mlx")

    [*convert(open_source(tmp_path / "result"), tmp_path / "again", only=r"mlp\.")]

    config = config_of(tmp_path / "again")
    assert len(config["mlx_marlin"]["layers"]) == 2 * 3
    assert all(".mlp." in layer for layer in config["mlx_marlin"]["layers"])
    assert config["quantization"]["bits"] == 5
    arrays = Folder(tmp_path / "again").arrays
    assert "model.layers.0.self_attn.q_proj.scales" in arrays
    assert "model.layers.0.mlp.up_proj.words" in arrays


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_quantization_that_no_weight_would_get_is_refused(
    tmp_path: Path, layout: str
) -> None:
    write(tmp_path / "source", "plain")
    converted(tmp_path, layout=layout, quantization=Quantization(bits=4))
    write(tmp_path / "foreign", "gptq")
    how = Quantization(bits=8)
    for source, only in (("result", None), ("result", "mlp"), ("foreign", "_proj")):
        for dry_run in (True, False):
            options = {"quantization": how, "only": only, "dry_run": dry_run}
            rows = convert(open_source(tmp_path / source), tmp_path / "new", **options)
            said = rf"{source}: bits=8 \(affine\).*quantized already.*plain original"
            with pytest.raises(ValueError, match=said):
                next(rows)
    assert not (tmp_path / "new").exists()


def test_plain_weights_among_quantized_ones_are_quantized(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    rows = converted(tmp_path, quantization=Quantization(bits=8))
    targets = {row.name: row.target for row in rows}
    assert targets["lm_head.weight"] == "affine 8-bit, group 64, marlin layout"
    up = targets["model.layers.0.mlp.up_proj.weight"]
    assert up == "zero_point 4-bit, group 64, marlin layout"


def test_packed_layers_that_do_not_match_stay_packed(tmp_path: Path) -> None:
    write(tmp_path / "source", "plain")
    # MLX has no such groups.
    converted(tmp_path, quantization=Quantization(bits=4, group_size=256))
    source = open_source(tmp_path / "result")

    [*convert(source, tmp_path / "again", layout="mlx", only="norm")]

    before = config_of(tmp_path / "result")["mlx_marlin"]
    assert len(before["layers"]) == 2
    assert config_of(tmp_path / "again")["mlx_marlin"] == before


def test_packed_scales_of_old_checkpoints_are_read(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    converted(tmp_path)
    file = str(tmp_path / "result" / "model.safetensors")
    arrays = mx.load(file)
    mx.eval(arrays)
    renamed = {
        name.replace("packed_scales", marlin_folder.OLD_SCALES): array
        for name, array in arrays.items()
    }
    mx.save_safetensors(file, renamed, {"format": "mlx"})
    assert renamed.keys() != arrays.keys()

    [*convert(open_source(tmp_path / "result"), tmp_path / "again")]

    again = mx.load(str(tmp_path / "again" / "model.safetensors"))
    assert again.keys() == arrays.keys()
    assert all(mx.array_equal(again[name], arrays[name]) for name in arrays)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    rows = converted(tmp_path, dry_run=True)
    assert len(rows) == 3 + 2 * (2 + len(LINEAR))
    quantized = [row for row in rows if row.source.startswith("zero_point")]
    assert len(quantized) == 2 * len(LINEAR)
    assert quantized[0].target == "zero_point 4-bit, group 64, marlin layout"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_is_left_if_the_conversion_is_given_up(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    kept = tmp_path / "kept"
    kept.mkdir()
    rows = convert(open_source(tmp_path / "source"), kept / "a" / "b" / "c")
    next(rows)
    assert len([*(kept / "a" / "b").iterdir()]) == 1
    rows.close()
    assert not [*kept.iterdir()]


def test_a_killed_conversion_is_begun_anew(tmp_path: Path) -> None:
    exact = write(tmp_path / "source", "gptq")
    partial = tmp_path / ".result.partial"
    partial.mkdir()
    (partial / "model-00001.safetensors").write_bytes(b"half of a file")
    converted(tmp_path)
    assert {*read_back(tmp_path / "result")} == {*exact}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "result"}


def test_two_conversions_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    exact = write(tmp_path / "source", "gptq")
    first = convert(open_source(tmp_path / "source"), tmp_path / "result")
    next(first)
    with pytest.raises(ValueError, match="another process is writing this folder"):
        converted(tmp_path)
    list(first)
    assert {*read_back(tmp_path / "result")} == {*exact}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "result"}


@pytest.mark.parametrize("check", [0, 1, 2])
def test_a_link_in_place_of_the_partial_folder_is_not_followed(
    tmp_path: Path, check: int, swap_at: Callable[..., None]
) -> None:
    write(tmp_path / "source", "gptq")
    mine, partial = tmp_path / "mine", tmp_path / ".result.partial"
    (mine / "file").mkdir(parents=True)
    swap_at(check, partial, mine)
    if check == 0:
        partial.symlink_to(mine)
    said = "another process is writing" if check else "is a link"
    with nullcontext() if check > 1 else pytest.raises(ValueError, match=said):
        converted(tmp_path)
    assert (mine / "file").exists()


LINKS = {
    "outside": "/etc/passwd",
    "relative": "../secret",
    "folder": "../blobs/secret",
    "hidden": "inner",  # a link in the same folder, which leads outside
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_links_out_of_a_folder_are_not_copied(tmp_path: Path, target: str) -> None:
    source = tmp_path / "blobs" / "source"
    write(source, "awq")
    for secret in (tmp_path / "secret", tmp_path / "blobs" / "secret"):
        secret.write_text("secret")
    (source / "inner").symlink_to("../secret")
    (source / "tokenizer.json").symlink_to(target)

    with pytest.raises(ValueError, match=r"is a link to .*, which is not copied"):
        converted(tmp_path / "blobs")

    assert not [*source.parent.glob("*result*")]


def test_a_folder_of_the_hubs_cache_is_converted(tmp_path: Path) -> None:
    source = tmp_path / "models--a--b" / "snapshots" / "main"
    write(source, "awq")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")

    [*convert(open_source(source), tmp_path / "out")]

    copied = tmp_path / "out" / "tokenizer_config.json"
    assert copied.read_text() == "{}"
    assert not copied.is_symlink()
    assert not [*blobs.glob("*.partial")]


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_full_device_names_the_file(tmp_path: Path, size: int) -> None:
    write(tmp_path / "source", "awq")

    # Python ignores the signal, so that a write of more raises an OSError.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match=r"\.result\.partial/\w"):
            converted(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not [*tmp_path.glob("*result*")]


def test_several_files_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = write(tmp_path / "source", "gptq")
    monkeypatch.setattr(Shards, "shard_bytes", 30_000)
    converted(tmp_path)
    assert len([*(tmp_path / "result").glob("*.safetensors")]) > 3
    assert {*read_back(tmp_path / "result")} == {*exact}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gptq", {"layout": "other"}, "layout='other', expected one of"),
        ("gptq", {"only": "("}, r"only='\(' is not a pattern"),
        ("gptq", {"only": "mpl"}, r"only='mpl' matches no parameter of .*'model\."),
        ("gptq-act-order", {"layout": "mlx"}, r"tensor '.*_proj\.weight': .*act-order"),
    ],
)
def test_nothing_is_left_of_what_is_refused(
    tmp_path: Path, name: str, options: dict[str, str], message: str
) -> None:
    write(tmp_path / "source", name)
    with pytest.raises(ValueError, match=message):
        converted(tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (tmp_path / "result").mkdir()
    with pytest.raises(ValueError, match="result exists"):
        converted(tmp_path)


QUANTIZATIONS = [
    {"mode": "affine", "bits": 4, "group_size": 64},
    {"mode": "affine", "bits": 3, "group_size": 16},
    {"mode": "symmetric", "bits": 6, "group_size": 128},
    {"mode": "zero_point", "bits": 4, "group_size": 32},
    {"mode": "affine", "bits": 4, "group_size": 64, "quantizer": "search"},
    {"mode": "zero_point", "bits": 4, "group_size": 0, "quantizer": "search"},
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]


@pytest.mark.parametrize("options", QUANTIZATIONS)
def test_plain_weights_are_quantized_on_the_way(tmp_path: Path, options: dict) -> None:
    write(tmp_path / "source", "plain")
    source = Folder(tmp_path / "source")
    rows = converted(tmp_path, quantization=Quantization(**options))
    errors = {row.name: row.error for row in rows}
    values = read_back(tmp_path / "result")
    for name in source.arrays:
        w = np.array(source.read(name).astype(mx.float32))
        error = np.linalg.norm(values[name] - w) / np.linalg.norm(w)
        assert errors[name] == pytest.approx(error, rel=1e-3)
        quantized = "_proj" in name or "lm_head" in name or "embed" in name
        assert (0 < error < 0.2) if quantized else error == 0


def test_only_weights_that_match_are_quantized(tmp_path: Path) -> None:
    write(tmp_path / "source", "plain")
    rows = converted(tmp_path, quantization=Quantization(), only="mlp")
    rounded = [row.name for row in rows if row.error > 0]
    assert len(rounded) == 2 * 3
    assert all(".mlp." in name for name in rounded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "other"}, "mode='other'"),
        ({"bits": 7}, "bits=7"),
        ({"group_size": 48}, "group_size=48, expected one of"),
        ({"quantizer": "best"}, "quantizer='best', expected one of"),
        (
            {"mode": "mxfp4", "group_size": 32, "quantizer": "search"},
            "quantizer='search' is for integers",
        ),
    ],
)
def test_wrong_quantizations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(**options)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_infinite_weights_are_refused(dtype: mx.Dtype, value: str) -> None:
    w = mx.zeros((32, 64), dtype)
    w[3, 5] = mx.finfo(dtype).max
    Quantization().apply(w)
    w[4, 6] = float(value)
    with pytest.raises(ValueError, match="a weight is NaN or infinite"):
        Quantization().apply(w)


def test_a_large_weight_is_quantized_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    w = mx.random.normal((3, 50, 128), key=mx.random.key(0))
    whole, error = Quantization().apply(w)
    monkeypatch.setattr(quantization, "CHUNK_BYTES", 7 * 128 * 4)
    chunked, again = Quantization().apply(w)
    for name in ("codes", "scales", "biases"):
        assert mx.array_equal(getattr(whole, name), getattr(chunked, name))
    assert chunked.shape == (3, 50, 128)
    assert again == pytest.approx(error)


def test_experts_with_global_scales_stay_in_mlx_layout(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    config = CONFIG | sizes | {"model_type": "mixtral"}
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    model, config = utils.quantize_model(
        model, config, 16, 4, mode="nvfp4", global_scale=True
    )
    utils.save_model(tmp_path / "source", model)
    utils.save_config(config, tmp_path / "source" / "config.json")

    converted(tmp_path)

    result = Folder(tmp_path / "result")
    layer = "model.layers.0.block_sparse_moe.switch_mlp.up_proj"
    assert f"{layer}.global_scale" in result.arrays
    assert result.config["quantization"][layer]["global_scale"] is True
    assert "model.layers.0.self_attn.q_proj" in result.config["mlx_marlin"]["layers"]
    loaded = load_model(open_source(tmp_path / "result"))
    ours, theirs = (
        m.model.layers[0].block_sparse_moe.switch_mlp.up_proj for m in (loaded, model)
    )
    for name in ("weight", "scales", "global_scale"):  # MLX computes it on GPUs alone
        assert mx.array_equal(ours[name], theirs[name])

    save(tmp_path / "saved", load_model(open_source(tmp_path / "source")), Tokenizer())
    again = load_model(open_source(tmp_path / "saved"))
    saved = config_of(tmp_path / "saved")["quantization"]
    assert saved[layer]["global_scale"] is True
    ours = again.model.layers[0].block_sparse_moe.switch_mlp.up_proj
    assert mx.array_equal(ours["global_scale"], theirs["global_scale"])


@sampled(4)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_embeddings_and_heads_are_quantized_as_in_mlx_lm(
    tmp_path: Path, layout: str, tied: bool, mode: str
) -> None:
    write(tmp_path / "source", "plain", tie_word_embeddings=tied)
    stock, config = utils.load_model(tmp_path / "source")
    stock, _ = utils.quantize_model(stock, config, 32, 4, mode)

    how = Quantization(bits=4, group_size=32, mode=mode)
    rows = converted(tmp_path, layout=layout, quantization=how)

    assert not [row for row in rows if row.plain_because]
    loaded = load_model(open_source(tmp_path / "result"))
    tokens = mx.array([[1, 2, 3, 4, 5]])
    # On a CPU stock products add in float16.
    assert oracles.error(loaded(tokens), np.array(stock(tokens), np.float64)) < 2e-2
    ours, theirs = (model.model.embed_tokens for model in (loaded, stock))
    assert mx.array_equal(ours.weight, theirs.weight)
    assert mx.array_equal(ours.scales, theirs.scales)
    if layout == "mlx":
        found, _ = utils.load_model(tmp_path / "result")
        pairs = zip(
            tree_flatten(found.parameters()),
            tree_flatten(stock.parameters()),
            strict=True,
        )
        assert all(a == b and mx.array_equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("bits", [0, 8])
def test_embeddings_have_their_own_bits_if_asked(tmp_path: Path, bits: int) -> None:
    write(tmp_path / "source", "plain")
    how = Quantization(bits=4, group_size=64, embedding_bits=bits)
    rows = converted(tmp_path, quantization=how)
    targets = {row.name: row.target for row in rows}
    own = "affine 8-bit, group 64" if bits else "float16"
    assert targets["model.embed_tokens.weight"].startswith(own)
    assert targets["lm_head.weight"].startswith(own)
    up = targets["model.layers.0.mlp.up_proj.weight"]
    assert up == "affine 4-bit, group 64, marlin layout"
    load_model(open_source(tmp_path / "result"))


def test_weights_in_other_containers_stay_behind(tmp_path: Path) -> None:
    write(tmp_path / "source", "plain")
    kept = ["LICENSE", "merges.txt", "vocab.json"]
    left = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
    left += ["model.gguf", "model.onnx", "tf_model.h5", "flax_model.msgpack"]
    for name in kept + left:
        (tmp_path / "source" / name).write_text("{}")
    converted(tmp_path)
    names = {file.name for file in (tmp_path / "result").iterdir()}
    assert names.issuperset(kept)
    assert names.isdisjoint(left)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_layers_that_mlx_lm_excludes_or_sets_are_quantized_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    write(tmp_path / "source", "plain")

    def predicate(path: str, layer: nn.Module) -> bool | dict:
        assert isinstance(layer, nn.Linear | nn.Embedding)
        if path == "lm_head":
            return False
        return {"group_size": 64, "bits": 8} if path.endswith("down_proj") else True

    monkeypatch.setattr(
        llama.Model, "quant_predicate", property(lambda _: predicate), raising=False
    )
    how = Quantization(bits=4, group_size=32, mode=mode)
    rows = converted(tmp_path, layout="mlx", quantization=how)
    targets = {row.name.removeprefix("model.layers.1."): row.target for row in rows}
    assert targets["lm_head.weight"] == "float16"
    assert targets["mlp.down_proj.weight"] == "affine 8-bit, group 64, mlx layout"
    assert targets["mlp.up_proj.weight"] == f"{mode} 4-bit, group 32, mlx layout"
    model, _ = utils.load_model(tmp_path / "result")
    assert "scales" in model.model.layers[1].mlp.up_proj
