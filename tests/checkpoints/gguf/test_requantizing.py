"""GGUF files are converted, and types without kernels quantized again."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import utils

import mlx_marlin
from mlx_marlin.checkpoints import gguf, quantization
from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.gguf import read
from mlx_marlin.checkpoints.gguf.blocks import BLOCK_TYPES
from mlx_marlin.checkpoints.quantization import Quantization, quantization_of
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from mlx_marlin.cli import demo
from mlx_marlin.cli.main import main
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import _narrowed, open_source
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.packed_weight import PackedWeight
from support import gguf_cases, oracles
from support.gguf_blocks import (
    DECODED,
    PLAIN,
    QUANTIZED,
    SIZES,
    decoded,
    draw_blocks,
    set_halves,
)
from support.gguf_cases import CASES
from support.gguf_files import Written, random_tensor, write_gguf
from support.gguf_models import (
    random_model,
    with_fused_gates,
    write_twice,
    written_model,
)
from support.gguf_vocabularies import byte_pairs

SHAPE = (6, 512)
types = pytest.mark.parametrize("name", DECODED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def one_tensor(path: Path, name: str) -> np.ndarray:
    """Writes a file with one weight, and returns its values."""
    octets = draw_blocks(name, SHAPE, np.random.default_rng(3))
    written = Written("blk.0.attn_v.weight", name, SHAPE, octets.tobytes())
    write_gguf(path, CASES["qwen3"].metadata, [written])
    return decoded(name, octets)


def test_every_other_type_is_of_whole_numbers() -> None:
    others = {each.name for each in BLOCK_TYPES.values()} - {*QUANTIZED, *PLAIN}
    wholes = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
    assert others - wholes == {*DECODED}


@types
def test_a_type_without_kernels_names_its_tensor_and_the_remedy(
    name: str, path: Path
) -> None:
    one_tensor(path, name)

    with pytest.raises(
        ValueError, match=rf"'blk\.0\.attn_v\.weight': {name}"
    ) as raised:
        read(path)

    assert "convert --requantize 4" in str(raised.value)
    assert "requantize=4" in str(raised.value)


@types
@pytest.mark.parametrize(("bits", "rows"), [(2, 6), (4, 4), (8, 6)])
def test_codes_are_those_of_mlx_for_the_decoded_weight(
    name: str, bits: int, rows: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all rows are decoded at once or four at a time."""
    exact = one_tensor(path, name)
    monkeypatch.setattr(quantization, "CHUNK_BYTES", rows * SHAPE[1] * 4)

    (tensor,) = read(path, Quantization(bits=bits))
    weight = tensor.read()

    assert isinstance(weight, StoredWeight)
    assert (weight.original, tensor.format, weight.shape) == (name, name, SHAPE)
    narrow = mx.array(exact).astype(mx.float16)
    expected = mx.quantize(narrow, group_size=64, bits=bits)
    parts = (weight.codes, weight.scales, weight.biases)
    for part, wanted in zip(parts, expected, strict=True):
        assert part is not None
        assert mx.array_equal(part, wanted)
    codes, *halves = expected
    wide_parts = (codes, *(part.astype(mx.float32) for part in halves))
    rounded = mx.dequantize(*wide_parts, group_size=64, bits=bits)
    wide = exact.astype(np.float64)
    error = np.linalg.norm(np.array(rounded, np.float64) - wide) / np.linalg.norm(wide)
    assert weight.error == pytest.approx(error, rel=1e-4)
    assert weight.error < {2: 1, 4: 0.2, 8: 0.02}[bits]


@types
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 65504.0])
def test_weights_that_are_not_finite_are_refused(
    name: str, scale: float, path: Path
) -> None:
    octets = draw_blocks(name, (1, 512), np.random.default_rng(0))
    blocks = octets.reshape(-1, SIZES[name][1])
    set_halves(name, blocks, np.array([scale], "<f2"))
    tensor = Written("blk.0.attn_v.weight", name, (1, 512), octets.tobytes())
    write_gguf(path, CASES["qwen3"].metadata, [tensor])

    (read_tensor,) = read(path, Quantization())
    if np.abs(decoded(name, octets)).max() < 65520:
        assert name in ("TQ1_0", "IQ1_S")  # whose largest scale is no larger a weight
        read_tensor.read()
        return
    with pytest.raises(ValueError, match=r"model\.gguf: tensor 'blk.*NaN or infinite"):
        read_tensor.read()


def test_a_missing_decoder_is_named_before_any_work(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_tensor(path, "IQ2_S")
    monkeypatch.setitem(sys.modules, "gguf", None)

    said = r"decoding IQ2_S needs .*: pip install gguf$"
    with pytest.raises(ImportError, match=said):
        read(path, Quantization())


@pytest.mark.parametrize("bits", [7, 0, -4, 4.5, "4", True])
def test_bits_without_codes_are_refused(bits: int, path: Path) -> None:
    one_tensor(path, "IQ2_S")
    with pytest.raises(ValueError, match=r"^requantize=.*, expected one of \[1, 2"):
        mlx_marlin.load(path, requantize=bits)
    with pytest.raises(ValueError, match=r"^requantize=.*, expected one of \[1, 2"):
        [*mlx_marlin.read_checkpoint(path, requantize=bits)]


def test_types_with_kernels_stay_as_they_are(path: Path) -> None:
    random = np.random.default_rng(0)
    tensor = random_tensor("blk.0.attn_v.weight", "Q4_0", SHAPE, random)
    write_gguf(path, CASES["qwen3"].metadata, [tensor])

    (one,) = read(path, quantization_of(2))
    weight = one.read()

    assert isinstance(weight, StoredWeight)
    assert (weight.mode, weight.bits, weight.original) == ("symmetric", 4, "")
    assert weight.error == 0


def test_a_checkpoint_is_read_one_tensor_at_a_time(path: Path) -> None:
    exact = one_tensor(path, "IQ1_M")

    ((parameter, packed),) = mlx_marlin.read_checkpoint(path, requantize=8)

    assert parameter == "model.layers.0.self_attn.v_proj.weight"
    assert isinstance(packed, mlx_marlin.PackedWeight)
    numbers = mlx_marlin.dequantize(packed, mx.float32)
    assert oracles.error(numbers, exact.astype(np.float64)) < 0.02


def written_twice(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path, set[str]]:
    """Writes a model with weights of a type, and one with the decoded numbers."""
    monkeypatch.setattr(gguf_cases, "HIDDEN", 256)
    case, random = CASES[name], np.random.default_rng(0)
    tensors = written_model(case, random_model(case))
    if "moe" in name:
        tensors = with_fused_gates(tensors)
    metadata = case.metadata | byte_pairs("qwen2")

    def blocks(values: np.ndarray) -> np.ndarray:
        return draw_blocks(kind, values.shape, random)

    return write_twice(folder, metadata, tensors, kind, blocks)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mistral3", "IQ2_XXS"),
        ("mixtral", "IQ3_XXS"),
        ("qwen3moe", "IQ1_S"),
        ("gemma3", "TQ2_0"),
    ],
)
def test_a_model_computes_with_the_decoded_numbers(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, exact, changed = written_twice(name, kind, tmp_path, monkeypatch)
    assert {part for each in changed for part in each.split(".")} >= {
        "attn_q",
        "token_embd",
    }

    with pytest.raises(ValueError, match=f"{kind} has no kernels"):
        mlx_marlin.load(stored)
    found, expected = (
        mlx_marlin.load(path, requantize=8)[0] for path in (stored, exact)
    )

    layers = {path for path, layer in found.named_modules() if "scales" in layer}
    assert len(layers) >= len(changed)
    for path, layer in expected.named_modules():
        if path in layers:  # weights are narrowed before they are quantized
            layer.set_dtype(mx.float16)
    nn.quantize(
        expected, group_size=64, bits=8, class_predicate=lambda path, _: path in layers
    )
    tokens = mx.array([[1, 5, 39, 0, 7, 3]])
    for model in (found, expected):
        model.set_dtype(mx.float32)
    assert oracles.error(found(tokens), np.array(expected(tokens), np.float64)) < 1e-4


def test_the_table_shows_the_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, _, changed = written_twice("qwen3moe", "IQ2_XS", tmp_path, monkeypatch)
    assert main(["convert", str(stored), str(tmp_path / "refused")]) == 2
    said = capsys.readouterr()
    assert "IQ2_XS has no kernels; `mlx-marlin convert --requantize 4`" in said.err
    assert said.out == ""  # no header of a table
    errors = {}
    for result, more in (("nearest", []), ("search", ["--quantizer", "search"])):
        words = ["convert", str(stored), str(tmp_path / result)]
        assert main([*words, "--requantize", "4", *more]) == 0
        out = capsys.readouterr().out
        rows = [line for line in out.splitlines() if "IQ2_XS → affine 4-bit" in line]
        count = sum(int(row.split()[1]) for row in rows)
        assert count == len(changed) + 2  # fused gates are two parameters
        errors[result] = sum(float(row.split()[-1]) for row in rows)
        assert f"bytes; {count} of them rounded" in out
        assert "float32 → affine" not in out  # routers stay plain
    assert 0 < errors["search"] < errors["nearest"] < 0.2 * (len(changed) + 2)

    found, expected = (
        mlx_marlin.load(tmp_path / "nearest")[0],
        mlx_marlin.load(stored, requantize=4)[0],
    )
    tokens = mx.array([[1, 5, 39]])
    wide = np.array(expected(tokens), np.float64)
    assert oracles.error(found(tokens), wide) < 0.01


def test_the_command_refuses_folders_and_bits_without_codes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_tensor(path, "IQ2_S")
    folder = demo.checkpoint()
    words = ["convert", str(folder), str(tmp_path / "result")]
    assert main([*words, "--requantize", "4"]) == 2
    assert "requantize=4, which is for GGUF files only" in capsys.readouterr().err
    with pytest.raises(ValueError, match="which is for GGUF files only"):
        mlx_marlin.load(folder, requantize=4)
    with pytest.raises(ValueError, match="which is for GGUF files only"):
        [*mlx_marlin.read_checkpoint(folder, requantize=4)]
    assert main(["convert", str(path), *words[2:], "--requantize", "7"]) == 2
    assert "bits=7 is not one of" in capsys.readouterr().err


FIELDS = ("n", "k", "group_size", "bits", "mode")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small llama; the files of its tokenizer have a test of their own."""
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {"tokenizer.json": "{}"})
    case = CASES["llama"]
    path = tmp_path / "model.gguf"
    random = np.random.default_rng(0)
    tensors = []
    for tensor in written_model(case, random_model(case)):
        matrix = "norm" not in tensor.name and "blk" in tensor.name
        name = "Q8_0" if "attn" in tensor.name else "Q4_1"
        drawn = random_tensor(tensor.name, name, tensor.shape, random)
        tensors.append(drawn if matrix else tensor)
    write_gguf(path, case.metadata, tensors)
    return path


def test_weights_are_the_ones_of_the_file(source: Path, tmp_path: Path) -> None:
    rows = [*convert(open_source(source), tmp_path / "result")]

    assert all(row.error == 0 for row in rows)
    folder = Folder(tmp_path / "result")
    records = folder.config.get("mlx_marlin", {}).get("layers", {})
    quantized = 0
    for tensor in gguf.read(source):
        value = tensor.read()
        layer = tensor.name.removesuffix(".weight")
        if isinstance(value, StoredWeight):
            packed = PackedWeight(
                words=folder.read(f"{layer}.words"),
                scales=folder.read(f"{layer}.packed_scales"),
                **{name: records[layer][name] for name in FIELDS},
            )
            decoded = dequantize(packed, mx.float32)
            np.testing.assert_array_equal(np.array(decoded), np.array(value.decoded()))
            quantized += 1
        else:
            back = folder.read(tensor.name)
            assert mx.array_equal(back.astype(mx.float32), value.astype(mx.float32))
            assert "norm" not in layer or back.dtype == mx.float16  # as scales
    assert quantized == len(records) == 2 * 7
    assert (tmp_path / "result" / "tokenizer.json").exists()


def test_rows_of_the_table_are_in_the_order_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "tokenizer_files", lambda _: {})
    case = replace(CASES["llama"], layers=11)
    written = written_model(case, random_model(case))
    path = write_gguf(tmp_path / "model.gguf", case.metadata, written[::-1])

    rows = convert(open_source(path), tmp_path / "result", dry_run=True)
    layers = [row.name.split(".")[2] for row in rows if ".layers." in row.name]

    assert [*dict.fromkeys(layers)] == [str(layer) for layer in range(11)]


def test_a_norm_that_float16_would_round_stays_as_it_is() -> None:
    exact = mx.array([1.0, 1 + 2**-20])
    assert _narrowed(exact, mx.float16) is exact


def test_mlx_lm_reads_what_is_written_in_its_layout(
    source: Path, tmp_path: Path
) -> None:
    [*convert(open_source(source), tmp_path / "result", layout="mlx")]
    model, _ = utils.load_model(tmp_path / "result")
    for tensor in gguf.read(source):
        if "mlp" in tensor.name:
            value = tensor.read()
            layer: Any = model
            for part in tensor.name.split(".")[:-1]:
                layer = layer[int(part)] if part.isdecimal() else layer[part]
            assert mx.array_equal(layer.weight, value.codes)
            assert mx.array_equal(layer.scales, value.scales)
            assert mx.array_equal(layer.biases, value.biases)
